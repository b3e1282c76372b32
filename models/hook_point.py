"""A hook point that knows its axes, knows whether anybody looks, and refuses what would go wrong.

TransformerLens' HookPoint is an identity module with hooks. A layer of ours asks its points who is
looking before it decides what to compute. Three ways in which hooks fail in silence elsewhere are
closed: under activation checkpointing, behind a compiled graph, and in a trace that reads what was
never computed.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint, LensHandle

from interp.models.unserved import Unserved

HookDirection = Literal["fwd", "bwd"]


class ObservedModule(nn.Module):
    """A module with points inside, which counts who looks at them.

    ``torch.compile`` does not see torch's own hooks come and go: a hook added after compilation
    would be ignored. It does see the attribute ``has_listeners`` change: a module that somebody
    looks at leaves the graph, and enters it again when they are gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_listeners = 0
        self.has_listeners = False  # what graphs depend on: not on how many there are

    def count_listeners(self, change: int) -> None:
        """More (or fewer) hooks or requests inside than before."""
        self.n_listeners += change
        self.has_listeners = self.n_listeners > 0

    @property
    def is_watched(self) -> bool:
        """True while a hook, `materialize` or a tracer, which replaces `forward`, may look."""
        return self.has_listeners or "forward" in self.__dict__

    @property
    def must_leave_graph(self) -> bool:
        """True where a graph is being compiled although somebody is looking."""
        return self.has_listeners and torch.compiler.is_compiling()

    def outside_graph(self, *inputs: Any, **options: Any) -> Any:
        """This module's forward, with the compiler switched off for it and all inside."""
        return torch.compiler.disable(_forward)(self, *inputs, **options)


def _forward(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    return module.forward(*inputs, **options)


class Point(HookPoint):
    """One observable tensor of a model.

    axes: the words of its axes in order, e.g. ``"batch", "pos", "d_model"``.
    """

    def __init__(self, *axes: str) -> None:
        super().__init__()
        self.axes = axes
        self.n_requests = 0  # open `materialize` contexts
        self.observers: tuple[ObservedModule, ...] = ()  # the modules around this point

    @property
    def is_wanted(self) -> bool:
        """True while a hook of any kind is attached, or `materialize` asks for this point."""
        return bool(
            self._forward_hooks
            or self._backward_hooks
            or self._forward_pre_hooks
            or self._backward_pre_hooks
            or self.n_requests
        )

    def __call__(self, x: Tensor) -> Tensor:
        if not (
            self._forward_hooks
            or self._backward_hooks
            or self._forward_pre_hooks
            or self._backward_pre_hooks
        ):
            return self.forward(x)  # what nn.Module would do, sooner
        if self._backward_hooks and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # frozen weights before it: its gradient still arrives
        return super().__call__(x)

    def request(self, change: int) -> None:
        """Ask for this point, or (-1) no longer, without a hook."""
        self.n_requests += change
        for observer in self.observers:
            observer.count_listeners(change)

    def decline(self) -> None:
        """Tell a tracer that wrapped this point, without hooks, that its tensor is not computed."""
        if "forward" not in self.__dict__:
            return
        assert self.name is not None
        unserved = Unserved(self.name)
        if self.forward(unserved) is not unserved:
            unserved.refuse("was assigned to")

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
        recomputation in the backward pass may come when the hook is gone, and the gradient would
        be that of another computation, without a word.
        """
        guarded = hook if dir == "bwd" else _GuardedHook(hook)
        handle = super().add_hook(guarded, dir, is_permanent, level, prepend, alias_names)
        handle.user_hook = hook
        return handle

    # Hooks may come the plain torch way too; whichever way, the modules around know of them.

    def register_forward_hook(
        self,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> "CountedHandle":
        """As nn.Module's, counted."""
        handle = super().register_forward_hook(
            hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )
        return CountedHandle(handle, self.observers)

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> "CountedHandle":
        """As nn.Module's, counted."""
        handle = super().register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)
        return CountedHandle(handle, self.observers)

    def register_full_backward_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> "CountedHandle":
        """As nn.Module's, counted."""
        handle = super().register_full_backward_hook(hook, prepend=prepend)
        return CountedHandle(handle, self.observers)

    def register_full_backward_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> "CountedHandle":
        """As nn.Module's, counted."""
        handle = super().register_full_backward_pre_hook(hook, prepend=prepend)
        return CountedHandle(handle, self.observers)


class ReadOut(Point):
    """A point whose tensor is told and not used: no edit of it could reach the output.

    Its gradient reaches what it was computed from. An edit, by a hook or by a tracer, raises
    ValueError.
    """

    def __call__(self, x: Tensor) -> Tensor:
        version, place = x._version, (x.data_ptr(), x.shape)
        seen = super().__call__(x)
        if x._version != version or (seen.data_ptr(), seen.shape) != place:
            raise ValueError(
                f"{self.name} is a read-out: it tells what attention did, and an edit would change "
                "nothing. Edit hook_q, hook_k, hook_attn_scores or hook_pattern instead."
            )
        return seen


class CountedHandle:
    """Handle of one hook; ``remove`` takes the hook away, as torch's RemovableHandle does."""

    def __init__(self, handle: RemovableHandle, observers: tuple[ObservedModule, ...]) -> None:
        self._handle = handle
        self._observers = observers
        self.id = handle.id
        for observer in observers:
            observer.count_listeners(1)

    def remove(self) -> None:
        self._handle.remove()
        for observer in self._observers:
            observer.count_listeners(-1)
        self._observers = ()

    def __enter__(self) -> "CountedHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class _GuardedHook:
    """A user's forward hook that refuses to run where its effect might not be differentiated."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, tensor: Any, hook: HookPoint) -> Any:
        if _is_inside_checkpoint():
            raise RuntimeError(
                f"{hook.name} has a hook and runs inside torch.utils.checkpoint: the recomputation "
                "in the backward pass may find other hooks than the forward pass did, and the "
                "gradient would be silently wrong. Remove the hook, or run without checkpointing."
            )
        return self.hook(tensor, hook=hook)

    def __repr__(self) -> str:  # the name of the hook in torch; a partial may hold whole caches
        inner = self.hook.func if isinstance(self.hook, partial) else self.hook
        return repr(inner)


def _is_inside_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
