"""What a model of ours offers around its forward pass: hooks by name, caches, materialization.

`HookedModel` is TransformerLens' HookedRootModule, with names that must exist, slices along the
axis that is the position, and caches that later edits cannot change.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice

from interp.models.activation_cache import SliceLike
from interp.models.hook_point import HookDirection, ObservedModule, Point, ReadOut

NamesFilter = str | Collection[str] | Callable[[str], bool] | None
NamedHook = tuple[str | Callable[[str], bool], Callable[..., Any]]

_POSITION_AXES = ("pos", "query_pos", "key_pos")


class HookedModel(ObservedModule, HookedRootModule):
    """A root module whose hook points are `Point`s. Call `setup` last in ``__init__``."""

    hook_dict: dict[str, Point]

    def setup(self) -> None:
        """Name every module and point, and tell each point which modules are around it."""
        super().setup()
        for point in self.hook_dict.values():
            point.observers = ()
        for module in self.modules():
            if isinstance(module, ObservedModule):
                for inner in module.modules():
                    if isinstance(inner, Point):
                        inner.observers += (module,)

    def resolve_names(self, names: NamesFilter) -> list[str]:
        """Full names of the points that a filter means, in the order of the forward pass.

        names: None (all), a full name, a collection of full names, or a predicate on full names.

        Raises ValueError for a name that is no point, listing the nearest ones, and for a filter
        that leaves nothing; TypeError for anything else.
        """
        if names is None:
            return list(self.hook_dict)
        if isinstance(names, str):
            names = [names]
        if callable(names):
            chosen = [name for name in self.hook_dict if names(name)]
        elif isinstance(names, Collection):
            for name in names:
                self._check_name(name)
            chosen = [name for name in self.hook_dict if name in names]
        else:
            raise TypeError(
                f"names: got {type(names).__name__}, expected a name, a collection of names, a "
                "predicate, or None for all"
            )
        if not chosen:
            raise ValueError(
                "names: no hook point is left; this model has "
                f"{', '.join(list(self.hook_dict)[:8])}, ... (all in point_table())"
            )
        return chosen

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"names: got {name!r}, expected full names of hook points")
        if name in self.hook_dict:
            return
        same_end = [known for known in self.hook_dict if known.endswith(f".{name}")]
        near = same_end or difflib.get_close_matches(name, self.hook_dict, n=4, cutoff=0.5)
        hint = f"; near it: {', '.join(near[:4])}" if near else ""
        raise ValueError(f"{name!r} is no hook point of this model{hint} (all in point_table())")

    # Hooks.

    def hooks(
        self,
        fwd_hooks: Sequence[NamedHook] = (),
        bwd_hooks: Sequence[NamedHook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> AbstractContextManager["HookedModel"]:
        """Context in which the given hooks are attached; HookedRootModule.hooks with known names.

        Each hook is ``(name or predicate on names, function)``. Raises ValueError for a name that
        is no point or a predicate that fits none, before anything is attached.
        """
        for name, _ in (*fwd_hooks, *bwd_hooks):
            self.resolve_names(name)
        context: AbstractContextManager[HookedModel] = super().hooks(
            list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts
        )
        return context

    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: Callable[..., Any],
        dir: HookDirection = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Attach a hook until `reset_hooks`; raises ValueError for a name that is no point."""
        self.resolve_names(name)
        super().add_hook(name, hook, dir, is_permanent, level, prepend)

    @contextmanager
    def materialize(self, *names: str) -> Iterator[None]:
        """Compute these points inside the block although no hook is attached to them.

        For tracers that add no hooks, as nnsight. A name is a full one, or its last part
        (``"hook_pattern"``) for every layer. Raises ValueError for a name that is no point.
        """
        points: list[Point] = []
        for name in names:
            last_part = [p for full, p in self.hook_dict.items() if full.endswith(f".{name}")]
            if not last_part:
                self._check_name(name)
            points += last_part or [self.hook_dict[name]]
        for point in points:
            point.request(1)
        try:
            yield
        finally:
            for point in points:
                point.request(-1)

    # Caches.

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: SliceLike = None,
    ) -> tuple[dict[str, Tensor], list[NamedHook], list[NamedHook]]:
        """Hooks that fill a dictionary with what the points see; nothing is attached yet.

        Gradients go under ``name + "_grad"``; a read-out has none, since no logit depends on it.
        ``pos_slice`` applies to each point's position axis:
        ``pos``, ``query_pos``, or, where that is the only one, ``key_pos``. What other hooks may
        edit in place is stored as a copy.

        Raises as `resolve_names` does.
        """
        cache = {} if cache is None else cache
        chosen = self.resolve_names(names_filter)
        may_be_edited = any(point.is_wanted for point in self.hook_dict.values())
        position_slice = Slice.unwrap(pos_slice)

        def save(tensor: Tensor, hook: HookPoint, suffix: str) -> None:
            assert isinstance(hook, Point)
            stored = tensor.detach()
            stored = stored.clone() if may_be_edited else stored
            stored = stored.to(device) if device is not None else stored
            axis = next((i for i, word in enumerate(hook.axes) if word in _POSITION_AXES), None)
            if axis is not None:
                stored = position_slice.apply(stored, dim=axis)
            if remove_batch_dim:
                stored = stored.squeeze(0)
            cache[f"{hook.name}{suffix}"] = stored

        edited = [name for name in chosen if not isinstance(self.hook_dict[name], ReadOut)]
        forward: list[NamedHook] = [(name, partial(save, suffix="")) for name in chosen]
        backward: list[NamedHook] = [(name, partial(save, suffix="_grad")) for name in edited]
        return cache, forward, backward if incl_bwd else []

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Attach caching hooks until `reset_hooks`, and return the dictionary that they fill."""
        cache, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache
        )
        directions: Iterable[tuple[HookDirection, list[NamedHook]]] = (
            ("fwd", forward),
            ("bwd", backward),
        )
        for direction, hooks in directions:
            for name, hook in hooks:
                self.add_hook(name, hook, direction)
        return cache
