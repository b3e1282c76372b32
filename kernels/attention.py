"""Attention that is fused and still tells what it did: the one public function.

`attention` checks its arguments, resolves them into one description (`interp.kernels.options`),
hands q, k, v and that description to a backend, and finishes what is the same for all of them:
the value of a key-value bias, given patterns, the gate, given outputs.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from interp.kernels import backends, reference, resolve, resolve_edits
from interp.kernels.checks import check_device, check_tensor, describe
from interp.kernels.edits import Edit
from interp.kernels.options import AttentionOptions, statistics_dtype
from interp.kernels.resolve_edits import Overrides
from interp.kernels.scores import Selection
from interp.kernels.variants import KeyValueBias, Variant

_NOT_COMPILED = (
    "attention() chooses its backend in Python and runs outside compiled graphs: compile with "
    "fullgraph=False, or compile what comes before and after it"
)
_uncompiled: list[Callable[..., "AttentionOutput"]] = []


@dataclass(frozen=True, eq=False, repr=False)
class AttentionOutput:
    """What attention computed: the output, the statistics asked for, and any row on demand.

    ``out`` [batch, head_index, query_pos, d_value] in the type of q; statistics in float32
    (float64 for float64), natural logarithms:

    ============  ==========================================  ====================================
    name          shape                                       meaning
    ============  ==========================================  ====================================
    lse           [batch, head_index, query_pos]              log-sum-exp of the scores, slot too
    entropy       [batch, head_index, query_pos]              entropy in nats, slot included
    max           [batch, head_index, query_pos]              largest weight on a key
    sink_mass     [batch, head_index, query_pos]              weight of the sink or slot
    mass          [batch, head_index, query_pos, set]         weight on each of ``key_sets``
    received      [batch, head_index, key_pos]                weight that a key gets, summed
    ============  ==========================================  ====================================

    A statistic that was not asked for raises when it is read. ``backend`` says what ran and
    ``reason`` why, in a sentence.
    """

    out: Tensor
    backend: str
    reason: str
    key_sets: tuple[str, ...]
    statistics: Mapping[str, Tensor]
    _rows: Callable[[Tensor, Tensor], Tensor]
    _sizes: tuple[int, int]

    def _statistic(self, name: str) -> Tensor:
        if name not in self.statistics:
            asked = tuple(self.statistics)
            raise ValueError(f"{name} was not asked for: statistics={asked}; add {name!r} to them")
        return self.statistics[name]

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of the scores [batch, head_index, query_pos]; -inf for a masked row."""
        return self._statistic("lse")

    @property
    def entropy(self) -> Tensor:
        """Entropy in nats [batch, head_index, query_pos]; a sink counts as one more key."""
        return self._statistic("entropy")

    @property
    def max(self) -> Tensor:
        """Largest weight on a key [batch, head_index, query_pos], in [0, 1]."""
        return self._statistic("max")

    @property
    def mass(self) -> Tensor:
        """Weight on each key set [batch, head_index, query_pos, set], in the order of key_sets."""
        return self._statistic("mass")

    @property
    def received(self) -> Tensor:
        """Weight that each key receives from all queries [batch, head_index, key_pos]."""
        return self._statistic("received")

    @property
    def sink_mass(self) -> Tensor:
        """Weight of the learned sink or slot [batch, head_index, query_pos], in [0, 1]."""
        return self._statistic("sink_mass")

    def pattern(
        self, heads: Sequence[int] | None = None, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Exact weights of chosen heads and rows: [batch, len(heads), len(rows), key_pos].

        Computed when asked for, from q and k, and differentiable; None means all. Negative indices
        count from the end. Rows sum to 1 for softmax, to less with a sink, and to whatever other
        variants and edits make of them.
        """
        chosen = []
        for name, asked, n in (("heads", heads, self._sizes[0]), ("rows", rows, self._sizes[1])):
            indices = list(range(n)) if asked is None else [int(index) for index in asked]
            for index in indices:
                if not -n <= index < n:
                    raise ValueError(f"{name}: asks for {index}, expected {-n} to {n - 1}")
            chosen.append(torch.tensor([i % n for i in indices], dtype=torch.int64))
        device = self.out.device
        return self._rows(chosen[0].to(device), chosen[1].to(device))

    def __repr__(self) -> str:
        return (
            f"AttentionOutput(out={list(self.out.shape)}, statistics={tuple(self.statistics)}, "
            f"backend={self.backend!r})"
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    prefix: int | Tensor = 0,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    gate: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    variant: str | Variant = "softmax",
    statistics: Sequence[str] = ("lse",),
    key_sets: Mapping[str, Sequence[int] | Tensor] | None = None,
    edit: Edit | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """Attention with statistics, gradients through both, and interventions inside.

    q is [batch, head_index, query_pos, d_head]; k and v are [batch, key_value_head, key_pos, d_head
    or d_value]; the number of key-value heads divides that of the query heads, the last stride is
    1, and all three have one type: float16, bfloat16, float32 or float64. Positions are
    end-aligned: query i stands at place ``i + key_pos - query_pos``, and its distance to key j is
    that minus j. Masks add up; a row that may see no key gives output 0, lse -inf, entropy 0.

    causal
        No key at a distance below 0.
    window
        A width w: distances below w (in both directions where not causal); or the distances
        ``(nearest, farthest)``, both included.
    prefix
        The first so many keys are open to every query, beyond causality and window; an int, or
        one per sample.
    key_mask
        bool [batch, key_pos], True where a key may be seen (padding is False).
    scale, softcap, alibi, bias
        score = softcap * tanh(scale * q k / softcap) - alibi[head] * |distance| + bias; scale is
        1/sqrt(d_head) unless given; bias is [query_pos, key_pos] with optional head and batch
        axes, 1 where it is the same for all, and differentiable.
    sink
        [head_index]: a learned logit beside the scores that takes weight and has no value.
    gate
        [batch, head_index, query_pos, d_value or 1] before the sigmoid; multiplies the output.
    documents
        Integer ids [batch, key_pos]: queries see keys of their own document. The queries are the
        last ones of it; a pair (ids of the queries, ids of the keys) says otherwise.
    mask
        The caller's own: bool (True: may be seen) or floating point (added to the score), shaped
        as bias.
    variant
        What stands in the place of softmax: see `interp.kernels.variants`.
    statistics, key_sets
        Names listed in `AttentionOutput`. ``mass`` needs key sets: from a name to key positions,
        or to a bool [key_pos] or [batch, key_pos].
    edit
        An `interp.kernels.edits.Edit`.
    backend
        "reference" (materialises the pattern: the definition), "strips" (plain torch), "c" (CPU),
        "triton" (CUDA), or "auto".

    Raises ValueError or TypeError, naming the argument, for anything that does not fit together.
    Under autocast q, k and v are cast as torch's own attention casts them.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=_NOT_COMPILED)
    # not even imported, let alone asked to step aside, in a process that compiles nothing
    run = _outside_graphs() if "torch._dynamo" in sys.modules else _attention
    return run(
        q,
        k,
        v,
        causal=causal,
        window=window,
        prefix=prefix,
        key_mask=key_mask,
        scale=scale,
        softcap=softcap,
        alibi=alibi,
        bias=bias,
        sink=sink,
        gate=gate,
        documents=documents,
        mask=mask,
        variant=variant,
        statistics=statistics,
        key_sets=key_sets,
        edit=edit,
        backend=backend,
    )


def _outside_graphs() -> Callable[..., AttentionOutput]:
    """`_attention`, which torch.compile runs as it is, with everything it calls."""
    if not _uncompiled:
        _uncompiled.append(torch.compiler.disable(_attention, reason=_NOT_COMPILED))
    return _uncompiled[0]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | tuple[int, int] | None,
    prefix: int | Tensor,
    key_mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    alibi: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    documents: Tensor | tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    variant: str | Variant,
    statistics: Sequence[str],
    key_sets: Mapping[str, Sequence[int] | Tensor] | None,
    edit: Edit | None,
    backend: str,
) -> AttentionOutput:
    """What `attention` does, arguments as there."""
    q, k, v = _autocast(q, k, v)
    options = resolve.resolve_operands(q, k, v)
    fields = resolve.resolve_masks(
        options,
        q,
        causal=causal,
        window=window,
        prefix=prefix,
        key_mask=key_mask,
        documents=documents,
        mask=mask,
    )
    fields |= resolve.resolve_scores(
        options,
        q,
        scale=scale,
        softcap=softcap,
        alibi=alibi,
        bias=bias,
        sink=sink,
        variant=variant,
    )
    has_slot = "slot" in fields or fields["variant"].name == KeyValueBias.name
    fields |= resolve.resolve_statistics(
        options, q, statistics=statistics, key_sets=key_sets, has_slot=has_slot
    )
    options = replace(options, **fields)
    if gate is not None:
        _check_gate(gate, q, options)
    with torch.autocast(q.device.type, enabled=False):
        overrides = Overrides()
        if edit is not None:
            resolve_edits.check_edit(edit)
            q, k, v, options = resolve_edits.patch_operands(edit, q, k, v, options)
            options, overrides = resolve_edits.resolve_edit(edit, q, options)
        options, slot_value = resolve.bias_slot(options, q)
        name, reason = backends.choose(backend, q, options)
        results = _attend(name, q, k, v, options, slot_value)
        results = resolve_edits.override_patterns(results, overrides.patterns, v, options)
        out = results.pop("out")
        if gate is not None:
            out = out * torch.sigmoid(gate).to(out.dtype)
        out = resolve_edits.override_outputs(out, overrides.outputs)

    def rows(heads: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            return _pattern(name, q, k, options, overrides, heads, positions)

    return AttentionOutput(
        out=out,
        backend=name,
        reason=reason,
        key_sets=tuple(key_sets or ()),
        statistics={name: results[name] for name in options.statistics},
        _rows=rows,
        _sizes=(options.n_heads, options.query_pos),
    )


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operands as autocast would hand them to torch's own attention."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    cast = [
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in (q, k, v)
    ]
    return cast[0], cast[1], cast[2]


def _check_gate(gate: Tensor, q: Tensor, options: AttentionOptions) -> None:
    check_device("gate", check_tensor("gate", gate), q)
    rows = (options.batch, options.n_heads, options.query_pos)
    if not gate.is_floating_point() or gate.shape not in ((*rows, options.d_value), (*rows, 1)):
        raise ValueError(
            f"gate: got {describe(gate)}, expected floating point of shape "
            f"{(*rows, options.d_value)}, or {(*rows, 1)} for one gate per head"
        )


def _attend(
    name: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, slot_value: Tensor | None
) -> dict[str, Tensor]:
    """Run a backend; then the key-value bias, whose slot has a value and lives in dead rows too."""
    attend = backends.load(name).attend
    if options.variant.name != KeyValueBias.name:
        return attend(q, k, v, options)
    assert options.slot is not None
    asked = options.statistics
    needed = tuple(dict.fromkeys((*asked, "lse", "sink_mass")))
    results = attend(q, k, v, replace(options, statistics=needed))
    is_dead = results["lse"] == -torch.inf
    results["lse"] = torch.where(is_dead, options.slot, results["lse"])
    results["sink_mass"] = results["sink_mass"].masked_fill(is_dead, 1.0)
    if slot_value is not None:
        added = results["sink_mass"][..., None] * slot_value[:, None, :]
        results["out"] = results["out"] + added.to(results["out"].dtype)
    return {key: results[key] for key in ("out", *asked)}


def _pattern(
    name: str,
    q: Tensor,
    k: Tensor,
    options: AttentionOptions,
    overrides: Overrides,
    heads: Tensor,
    rows: Tensor,
) -> Tensor:
    """Weights of some rows by the definition, with the edit's patterns in place."""
    sources = [x for x in (q, k, options.bias, options.slot) if x is not None]
    if name == "triton" and not (torch.is_grad_enabled() and any(x.requires_grad for x in sources)):
        weights = backends.load(name).pattern(q, k, options, heads, rows)
    else:
        dtype = statistics_dtype(q.dtype)
        selection = Selection(heads, rows, 0, options.key_pos)
        weights = reference.row_weights(q.to(dtype), k.to(dtype), options, selection).weights
    given = [
        overrides.patterns[head].index_select(1, rows) if head in overrides.patterns else own
        for head, own in zip(heads.tolist(), weights.unbind(1), strict=True)
    ]
    return torch.stack(given, 1) if overrides.patterns and given else weights
