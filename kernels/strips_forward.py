"""Forward pass of strips: output and statistics, some rows at a time.

Letters: B batch, H query heads, K keys; a strip has N units (key-value heads of samples) with
M = G * R rows and W keys; D head size, E value size. Whole rows are present, so column sums cost no
second product of q and k.

    S = scale q k^T     m = max S     P = e^(S - m)     l = sum P + e^(slot - m)
    out = P v / l       lse = m + log l       entropy = log l - sum P (S - m) / l, and the slot's
    max = 1 / l over keys             received = P^T (1 / l)

A dead row, whose scores are all -inf, has P = 0 and l = 0 and is left at zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from interp.kernels.options import AttentionOptions, statistics_dtype
from interp.kernels.reference import RowWeights, weights_of_scores
from interp.kernels.scores import finish_scores, knocked_out, pick
from interp.kernels.strip_plan import Strip, Unit, mask_in_place, plan

# exp of these is 0; clamping to them keeps -inf out of products with 0.
LOWEST = {torch.float32: -110.0, torch.float64: -800.0}


@dataclass(frozen=True, eq=False)
class Operands:
    """Keys and values of a unit, [N, K, D] and [N, K, E], in the type that is computed in."""

    k: Tensor
    v: Tensor


def operands(k: Tensor, v: Tensor, unit: Unit, dtype: torch.dtype) -> Operands:
    picked = (x[unit.samples, unit.key_value_heads].to(dtype).flatten(0, 1) for x in (k, v))
    return Operands(*picked)


def rows_of(x: Tensor, unit: Unit, strip: Strip, dtype: torch.dtype) -> Tensor:
    """Rows of a strip from [B, H, Q, ...], as [N, M, ...]."""
    rows = x[unit.samples, unit.heads, strip.first : strip.last].to(dtype)
    return rows.reshape(unit.n_units, -1, *x.shape[3:])


def per_head(x: Tensor, unit: Unit) -> Tensor:
    """A strip [N, M, ...] seen as [samples, heads, R, ...]."""
    n_samples, n_heads = unit.options.batch, unit.heads.stop - unit.heads.start
    return x.view(n_samples, n_heads, -1, *x.shape[2:])


class Buffers:
    """Memory for strips, taken once: every strip is a view of the same bytes."""

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self._like, self._dtype, self._held = like, dtype, dict[str, Tensor]()

    def get(self, name: str, *shape: int) -> Tensor:
        size = 1
        for length in shape:
            size *= length
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = torch.empty(size, dtype=self._dtype, device=self._like.device)
            self._held[name] = held
        return held[:size].view(shape)


def has_extras(options: AttentionOptions) -> bool:
    """Whether scores are more than a scaled product."""
    o = options
    extras = (o.softcap, o.alibi, o.bias, o.temperature, o.random_heads, o.mask_added)
    return any(extra is not None for extra in extras)


def compute_scores(
    q: Tensor, k: Tensor, unit: Unit, strip: Strip, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Masked scores [N, M, W] in ``out``, from q [N, M, D] and k [N, W, D].

    Also, where there are extras, the bare dot products that they were made of.
    """
    o = unit.options
    dots = None
    if has_extras(o):
        dots = torch.bmm(q, k.transpose(1, 2))
        out.copy_(finish_scores(per_head(dots, unit), o, strip).view_as(out))
    else:
        torch.bmm(q * o.scale, k.transpose(1, 2), out=out)
    mask_in_place(per_head(out, unit), o, strip)
    return out, dots


def slot_rows(unit: Unit, strip: Strip, like: Tensor) -> Tensor | None:
    """The slot's logits [N, M]."""
    if unit.options.slot is None:
        return None
    return rows_of_slot(unit.options.slot, unit, strip).to(like.dtype)


def rows_of_slot(x: Tensor, unit: Unit, strip: Strip) -> Tensor:
    """Rows of a [samples, H, Q] tensor of the narrowed options, as [N, M]."""
    return x[:, unit.heads, strip.first : strip.last].reshape(unit.n_units, -1)


def allocate(q: Tensor, options: AttentionOptions, names: tuple[str, ...]) -> dict[str, Tensor]:
    """What dead rows and unseen keys get, everywhere."""
    o, dtype = options, statistics_dtype(q.dtype)
    rows = (o.batch, o.n_heads, o.query_pos)
    n_sets = 0 if o.key_sets is None else o.key_sets.shape[1]
    shapes = {"mass": (*rows, n_sets), "received": (o.batch, o.n_heads, o.key_pos)}
    results = {}
    for name in names:
        if name == "out":
            results[name] = torch.zeros(*rows, o.d_value, dtype=q.dtype, device=q.device)
        else:
            results[name] = torch.zeros(shapes.get(name, rows), dtype=dtype, device=q.device)
    results["lse"].fill_(-torch.inf)
    return results


def compute_results(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """``"out"`` and the statistics in ``names``, lse among them."""
    dtype = statistics_dtype(q.dtype)
    results = allocate(q, options, names)
    buffers = Buffers(q, dtype)
    n_threads = torch.get_num_threads() if q.device.type == "cpu" else 1
    for unit in plan(options, element_size=dtype.itemsize, n_threads=n_threads):
        ours = operands(k, v, unit, dtype)
        for strip in unit.strips(q.device):
            rows = rows_of(q, unit, strip, dtype)
            scores = buffers.get("scores", *rows.shape[:2], strip.high - strip.low)
            scores, _ = compute_scores(rows, ours.k[:, strip.keys], unit, strip, scores)
            if options.is_softmax:
                found = _softmax_strip(scores, ours.v, unit, strip, buffers, names)
            else:
                found = _variant_strip(scores, ours.v, unit, strip, names)
            _store(found, results, unit, strip)
    return results


def _softmax_strip(
    scores: Tensor,
    v: Tensor,
    unit: Unit,
    strip: Strip,
    buffers: Buffers,
    names: tuple[str, ...],
) -> dict[str, Tensor]:
    """Results of one strip by the formulas above; the scores are overwritten."""
    o = unit.options
    peak = scores.amax(-1)
    is_dead = peak == -torch.inf
    slot = slot_rows(unit, strip, scores)
    shift = peak.masked_fill(is_dead, 0.0)
    if slot is not None:
        shift = torch.maximum(shift, slot).masked_fill_(is_dead, 0.0)
    scores.sub_(shift[..., None]).clamp_(min=LOWEST[scores.dtype])
    powers = scores
    if "entropy" in names:
        powers = torch.exp(scores, out=buffers.get("powers", *scores.shape))
    else:
        powers.exp_()
    total = powers.sum(-1)
    slot_power = None
    if slot is not None:
        slot_power = torch.exp(slot - shift).masked_fill_(is_dead, 0.0)
        total = total + slot_power
    log_total = torch.log(total)
    inverse = total.reciprocal().masked_fill_(is_dead, 0.0)
    found = {"lse": shift + log_total}
    if "max" in names:
        found["max"] = torch.exp(peak - shift) * inverse
    if "sink_mass" in names and slot_power is not None:
        found["sink_mass"] = slot_power * inverse
    if "entropy" in names:
        spread = scores.mul_(powers).sum(-1)
        if slot is not None and slot_power is not None:
            spread = spread + slot_power * (slot - shift).clamp_min(LOWEST[scores.dtype])
        found["entropy"] = (log_total - spread * inverse).masked_fill_(is_dead, 0.0)
    if o.is_cut_after:
        _cut(powers, unit, strip)
    found["out"] = torch.bmm(powers, v[:, strip.keys]) * inverse[..., None]
    found |= _sums_of_weights(powers, inverse, unit, strip, names)
    return found


def _cut(weights: Tensor, unit: Unit, strip: Strip) -> None:
    cut = knocked_out(unit.options, strip)
    if cut is not None:
        per_head(weights, unit).masked_fill_(cut, 0.0)


def _sums_of_weights(
    weights: Tensor, factors: Tensor | None, unit: Unit, strip: Strip, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Masses on key sets, [N, M, S], and what every key receives, [N * G, W]."""
    o, found = unit.options, dict[str, Tensor]()
    if "mass" in names:
        assert o.key_sets is not None
        sets = o.key_sets[:, :, strip.keys].to(weights.dtype).transpose(1, 2)
        masses = weights.view(o.batch, -1, weights.shape[-1]) @ sets
        masses = masses.view(*weights.shape[:2], -1)
        found["mass"] = masses if factors is None else masses * factors[..., None]
    if "received" in names:
        n_heads = o.batch * (unit.heads.stop - unit.heads.start)
        by_head = weights.view(n_heads, -1, weights.shape[-1])
        if factors is None:
            found["received"] = by_head.sum(1)
        else:
            found["received"] = torch.bmm(factors.view(n_heads, 1, -1), by_head)[:, 0]
    return found


def _variant_strip(
    scores: Tensor, v: Tensor, unit: Unit, strip: Strip, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Results of one strip by the definition, for the variants that are no softmax."""
    rows = variant_weights(scores, unit, strip)
    weights = rows.weights.view(scores.shape)
    found = {"out": torch.bmm(weights, v[:, strip.keys])}
    for name in ("lse", "entropy", "max", "sink_mass"):
        found[name] = getattr(rows, name).reshape(scores.shape[:2])
    return found | _sums_of_weights(weights, None, unit, strip, names)


def variant_weights(scores: Tensor, unit: Unit, strip: Strip) -> RowWeights:
    """The definition's weights for masked scores [N, M, W], as [samples, heads, R, W]."""
    o = unit.options
    by_head = per_head(scores, unit)
    cut = knocked_out(o, strip) if o.is_cut_after else None
    slot = None if o.slot is None else pick(o.slot, o, strip).to(scores.dtype)
    return weights_of_scores(by_head, by_head > -torch.inf, cut, slot, o)


def _store(found: dict[str, Tensor], results: dict[str, Tensor], unit: Unit, strip: Strip) -> None:
    n_heads = unit.heads.stop - unit.heads.start
    for name, whole in results.items():
        mine = whole[unit.samples, unit.heads]
        if name == "received":
            mine[:, :, strip.keys] += found[name].view(-1, n_heads, strip.high - strip.low)
        else:
            block = mine[:, :, strip.first : strip.last]
            block.copy_(found[name].view(block.shape))
