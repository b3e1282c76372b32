"""What a transformers mask says, in O(batch x pos) numbers, without a [query_pos, key_pos] tensor.

A model asks transformers for its mask, and transformers asks the function registered under the
model's attention implementation. Ours answers with a `LazyMask`: a tensor without storage that
keeps what was asked. Handed on untouched, it tells the kernel "causal, this window, this padding".
Code that computes with it (adds a bias to it, slices it) gets the numbers that eager attention
would have got, and from there on an ordinary tensor.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils import _pytree
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

# (batch indices [batch, 1], absolute positions [1 or batch, n]) -> document ids [batch, n]
DocumentIds = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MaskRule:
    """A mask as a rule: key j is seen from query i if all of this holds (absolute positions).

    ``nearest <= i - j <= farthest`` (None: open), and i and j have the same id in each of
    ``documents``.
    """

    nearest: int | None = None
    farthest: int | None = None
    documents: tuple[DocumentIds, ...] = ()

    def intersect(self, other: "MaskRule") -> "MaskRule":
        nearest = [n for n in (self.nearest, other.nearest) if n is not None]
        farthest = [n for n in (self.farthest, other.farthest) if n is not None]
        return MaskRule(
            max(nearest, default=None),
            min(farthest, default=None),
            (*self.documents, *other.documents),
        )


def read_rule(function: Callable[..., Any]) -> MaskRule | None:
    """The rule behind one of transformers' mask functions; None for a function we do not know.

    transformers composes closures: the names and the captured values say what they are. The caller
    checks what comes out on some rows, since another version may mean something else by them.
    """
    if function is causal_mask_function:
        return MaskRule(nearest=0)
    if function is bidirectional_mask_function:
        return MaskRule()
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    captured = inspect.getclosurevars(function).nonlocals
    maker = getattr(function, "__qualname__", "").split(".")[0]
    if maker == "and_masks":
        return _read_intersection(captured["mask_functions"])
    if maker == "sliding_window_overlay":
        return MaskRule(farthest=int(captured["sliding_window"]) - 1)
    if maker == "sliding_window_bidirectional_overlay":
        width = int(captured["sliding_window"])
        return MaskRule(nearest=-width, farthest=width)
    if maker == "packed_sequence_mask_function":
        return MaskRule(documents=(partial(_packed_ids, captured["packed_sequence_mask"]),))
    if maker == "chunked_overlay":
        chunks = partial(_chunk_ids, int(captured["chunk_size"]), captured["left_padding"])
        return MaskRule(documents=(chunks,))
    return None


def _read_intersection(functions: Sequence[Callable[..., Any]]) -> MaskRule | None:
    """Each function's rule, combined; None if one of them is unknown."""
    makers = [getattr(f, "__qualname__", "").split(".")[0] for f in functions]
    combined = MaskRule()
    for function, maker in zip(functions, makers, strict=True):
        if maker == "remap_positions_for_packed_sequence":
            # Positions that restart in every packed text keep their differences inside a text,
            # and between texts the packed mask beside it forbids everything.
            if "packed_sequence_mask_function" not in makers:
                return None
            function = inspect.getclosurevars(function).nonlocals["mask_function"]
        rule = read_rule(function)
        if rule is None:
            return None
        combined = combined.intersect(rule)
    return combined


def _packed_ids(texts: Tensor, batch: Tensor, positions: Tensor) -> Tensor:
    return texts[batch, positions]


def _chunk_ids(size: int, left_padding: Tensor, batch: Tensor, positions: Tensor) -> Tensor:
    return (positions - left_padding[batch]) // size


@dataclass(frozen=True, eq=False)
class MaskRequest:
    """What transformers asked of a mask function, and the rule behind it where we know it.

    Sizes and offsets are those of `transformers.masking_utils.sdpa_mask`: query i stands at
    absolute position ``q_offset + i``, key j at ``kv_offset + j``. ``text_mask`` is the 2-D mask
    [batch, at least every absolute position], True at real tokens, or None.
    """

    batch: int
    query_pos: int
    key_pos: int
    q_offset: int
    kv_offset: int
    function: Callable[..., Any]
    text_mask: Tensor | None
    use_vmap: bool
    dtype: torch.dtype
    device: torch.device
    rule: MaskRule | None = None

    def arguments(self) -> dict[str, Any]:
        """As transformers' own mask functions take them."""
        return {
            "batch_size": self.batch,
            "q_length": self.query_pos,
            "kv_length": self.key_pos,
            "q_offset": self.q_offset,
            "kv_offset": self.kv_offset,
            "mask_function": self.function,
            "attention_mask": self.text_mask,
            "use_vmap": self.use_vmap,
            "device": self.device,
        }

    def additive(self) -> Tensor:
        """The mask of eager attention: 0 where a key is seen, the dtype's minimum elsewhere."""
        return eager_mask(
            **self.arguments(), dtype=self.dtype, allow_is_bidirectional_skip=False
        ).contiguous()

    def allowed(self) -> Bool[Tensor, "batch 1 query_pos key_pos"]:
        """The mask of torch's attention: True where a key is seen."""
        return sdpa_mask(
            **self.arguments(), allow_is_causal_skip=False, allow_is_bidirectional_skip=False
        )

    def key_mask(self, n_keys: int) -> Bool[Tensor, "batch key_pos"] | None:
        """Padding among the first ``n_keys`` keys, False at padding; None if all are real."""
        if self.text_mask is None:
            return None
        real = self.text_mask[:, self.kv_offset : self.kv_offset + n_keys]
        missing = n_keys - real.shape[1]
        real = torch.nn.functional.pad(real, (0, missing)) if missing > 0 else real
        return None if bool(real.all()) else real

    def documents(
        self, rule: MaskRule, n_keys: int
    ) -> tuple[Int[Tensor, "batch query_pos"], Int[Tensor, "batch key_pos"]] | None:
        """One id per query and per key that says the same as all of the rule's documents."""
        if not rule.documents:
            return None
        rows = torch.arange(self.batch, device=self.device)[:, None]
        queries = torch.arange(self.query_pos, device=self.device)[None] + self.q_offset
        keys = torch.arange(n_keys, device=self.device)[None] + self.kv_offset
        positions = torch.cat([queries, keys], 1)
        ids = torch.stack([read(rows, positions) for read in rule.documents], -1)
        _, together = torch.unique(ids.flatten(0, 1), dim=0, return_inverse=True)
        together = together.view(self.batch, -1)
        return together[:, : self.query_pos], together[:, self.query_pos :]

    def n_seen_keys(self, rule: MaskRule) -> int:
        """Keys up to the last one that any query may see; a static cache holds more."""
        if rule.nearest is None or rule.nearest < 0:
            return self.key_pos
        return min(self.key_pos, self.q_offset + self.query_pos - self.kv_offset)


@dataclass(frozen=True, eq=False)
class KernelMask:
    """The mask as `interp.kernels.attention.attention` takes it, over the first ``n_keys`` keys."""

    n_keys: int
    causal: bool
    window: tuple[int, int] | None = None
    key_mask: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None


def kernel_mask(request: MaskRequest) -> KernelMask:
    """Compact where the rule is known and its queries are the last of its keys, else [Q, K]."""
    rule = request.rule
    if rule is None:
        return KernelMask(request.key_pos, causal=False, mask=request.allowed())
    n_keys = request.n_seen_keys(rule)
    is_bounded = rule.nearest is not None or rule.farthest is not None
    is_end_aligned = request.kv_offset + n_keys == request.q_offset + request.query_pos
    if is_bounded and not is_end_aligned:
        return KernelMask(request.key_pos, causal=False, mask=request.allowed())
    window = None
    if rule.farthest is not None:
        nearest = -request.key_pos if rule.nearest is None else rule.nearest
        window = (nearest, rule.farthest)
    return KernelMask(
        n_keys,
        causal=rule.nearest == 0,
        window=window,
        key_mask=request.key_mask(n_keys),
        documents=request.documents(rule, n_keys),
    )


def _rule_holds(request: MaskRequest, rule: MaskRule) -> bool:
    """Whether the rule says what the function says, on rows where they would differ first."""
    n, edge = request.query_pos, rule.farthest or 0
    chosen = {0, 1, n // 3, n // 2, edge, edge + 1, n - 1} & set(range(n))
    device = request.device
    i = torch.tensor(sorted(chosen), device=device)[None, None, :, None] + request.q_offset
    j = torch.arange(request.key_pos, device=device)[None, None, None, :] + request.kv_offset
    b = torch.arange(request.batch, device=device)[:, None, None, None]
    shape = (request.batch, 1, len(chosen), request.key_pos)
    told = request.function(b, torch.zeros_like(b), i, j).expand(shape)
    distance = i - j
    ours = torch.ones(shape, dtype=torch.bool, device=device)
    if rule.nearest is not None:
        ours = ours & (distance >= rule.nearest)
    if rule.farthest is not None:
        ours = ours & (distance <= rule.farthest)
    for read in rule.documents:
        ours = ours & (read(b, i) == read(b, j))
    return bool((told == ours).all())


def check_some_token_is_real(text_mask: Tensor, name: str = "attention_mask") -> None:
    """Raises ValueError for a text of padding only."""
    hidden = ~text_mask.bool().any(-1)
    if bool(hidden.any()):
        samples = hidden.nonzero().flatten().tolist()
        raise ValueError(
            f"{name}: hides every token of sample {samples[0] if len(samples) == 1 else samples}; "
            "expected at least one real token in each text: leave empty texts out of the batch"
        )


def check_some_key_is_seen(mask: Tensor) -> None:
    """Raises ValueError for a 4-D mask by which some text attends to nothing at all."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    hidden = ~seen.flatten(1).any(1)
    if bool(hidden.any()):
        samples = hidden.nonzero().flatten().tolist()
        raise ValueError(
            "attention_mask: hides every key from every query of sample "
            f"{samples[0] if len(samples) == 1 else samples}; expected some pair in each text"
        )


class LazyMask(Tensor):
    """A [batch, 1, query_pos, key_pos] mask without storage: see the module's first lines."""

    request: MaskRequest
    _kernel: KernelMask | None
    _additive: Tensor | None

    @staticmethod
    def __new__(cls, request: MaskRequest) -> "LazyMask":
        shape = (request.batch, 1, request.query_pos, request.key_pos)
        mask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=request.dtype, device=request.device, requires_grad=False
        )
        mask.request, mask._kernel, mask._additive = request, None, None
        return mask

    def kernel(self) -> KernelMask:
        """For the kernel; the same object serves every layer, so it is worked out once."""
        if self._kernel is None:
            self._kernel = kernel_mask(self.request)
        return self._kernel

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask(shape={tuple(self.shape)}, rule={self.request.rule})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = _pytree.tree_map_only(LazyMask, _additive, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _additive(mask: LazyMask) -> Tensor:
    if mask._additive is None:
        mask._additive = mask.request.additive()
    return mask._additive


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> LazyMask:
    """The function to register with transformers' AttentionMaskInterface.

    ``unused`` are the keywords by which transformers tells torch's and eager attention when to
    leave a mask out (``allow_is_causal_skip``, ``local_size``, ...), and ``config``.
    """
    text_mask = None
    if attention_mask is not None:
        text_mask = attention_mask.bool()
        check_some_token_is_real(text_mask)
        missing = kv_length + kv_offset - text_mask.shape[-1]
        if missing > 0:
            text_mask = torch.nn.functional.pad(text_mask, (0, missing))
    request = MaskRequest(
        batch=batch_size,
        query_pos=q_length,
        key_pos=kv_length,
        q_offset=int(q_offset),
        kv_offset=int(kv_offset),
        function=mask_function,
        text_mask=text_mask,
        use_vmap=use_vmap,
        dtype=dtype,
        device=torch.device(device),
    )
    rule = read_rule(mask_function)
    if rule is not None and _rule_holds(request, rule):
        request = replace(request, rule=rule)
    return LazyMask(request)
