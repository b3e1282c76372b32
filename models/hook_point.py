"""A hook point that knows its axes, whether anybody looks, and what it must refuse.

TransformerLens' HookPoint is an identity module with hooks. Ours adds what a layer needs to decide
what to compute, and turns two silent failures of hooking into errors.
"""

import sys
from collections.abc import Callable
from typing import Any, Literal

from transformer_lens.hook_points import HookPoint, LensHandle

HookDirection = Literal["fwd", "bwd"]


class Point(HookPoint):
    """One observable tensor of a model.

    axes: the words of its axes in order, e.g. ``("batch", "pos", "d_model")``.
    """

    def __init__(self, *axes: str) -> None:
        super().__init__()
        self.axes = axes
        self.n_requests = 0  # open `materialize` contexts

    @property
    def is_wanted(self) -> bool:
        """True while a hook of any kind is attached or `materialize` asks for this point."""
        return bool(
            self._forward_hooks
            or self._backward_hooks
            or self._forward_pre_hooks
            or self._backward_pre_hooks
            or self.n_requests
        )

    def add_hook(
        self,
        hook: Callable[..., Any],
        dir: HookDirection = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
    ) -> LensHandle:
        """Attach ``hook(tensor, hook=point)``, as HookPoint.add_hook does.

        A forward hook that runs inside ``torch.utils.checkpoint`` raises RuntimeError: the
        recomputation in the backward pass may come after the hook is gone, and the gradient would
        then be that of another computation, without a word.
        """
        guarded = hook if dir == "bwd" else _GuardedHook(hook)
        handle = super().add_hook(guarded, dir, is_permanent, level, prepend, alias_names)
        handle.user_hook = hook
        return handle


class _GuardedHook:
    """A user's forward hook that refuses to run where its effect could not be differentiated."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, tensor: Any, hook: HookPoint) -> Any:
        if _is_inside_checkpoint():
            raise RuntimeError(
                f"{hook.name} has a hook while it runs inside torch.utils.checkpoint: the "
                "recomputation in the backward pass may find other hooks than the forward pass "
                "did, and the gradient would be silently wrong. Remove the hook, or run without "
                "checkpointing."
            )
        return self.hook(tensor, hook=hook)

    def __repr__(self) -> str:
        return repr(self.hook)


def _is_inside_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
