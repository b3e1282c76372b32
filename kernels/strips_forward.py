"""Forward pass of strips: output and statistics, some rows at a time.

Letters: B batch, H query heads, K keys; a strip has N units (key-value heads of samples) with
M = G * R rows and W keys; D head size, E value size. Whole rows are present, so column sums cost no
second product of q and k.

    S = scale q k^T      P = softmax(S) over the keys      lse = max S - log(max P)
    out = P v            entropy = lse - sum P S           received = sum of P over the rows

A slot (a sink's logit) is put in afterwards, exactly; g is what the keys keep of a row:

    g = sigmoid(lse - slot)     out *= g     lse' = logaddexp(lse, slot)     masses, max *= g
    entropy' = g entropy - g log g - (1 - g) log(1 - g)
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.kernels.options import AttentionOptions, statistics_dtype
from interp.kernels.strip_plan import Strip, Unit, plan
from interp.kernels.strip_scores import (
    Buffers,
    compute_scores,
    cut_after,
    keys_of,
    rows_of,
    softmax_in,
    variant_weights,
)

Parts = dict[str, list[Tensor]]


def compute_results(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """``"out"`` and the statistics in ``names``, lse among them."""
    dtype = statistics_dtype(q.dtype)
    results = _allocate(q, options, names)
    buffers = Buffers(q.device, dtype)
    n_threads = torch.get_num_threads() if q.device.type == "cpu" else 1
    for unit in plan(options, element_size=dtype.itemsize, n_threads=n_threads):
        _Forward(unit, q, k, v, names, buffers).store(results)
    return results


def _allocate(q: Tensor, options: AttentionOptions, names: tuple[str, ...]) -> dict[str, Tensor]:
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


class _Forward:
    """The forward pass of one unit: its strips in turn, then everything stored at once."""

    def __init__(
        self,
        unit: Unit,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        names: tuple[str, ...],
        buffers: Buffers,
    ):
        self.unit, self.names, self.buffers = unit, names, buffers
        o, dtype = unit.options, statistics_dtype(q.dtype)
        self.q, self.slot = rows_of(q, unit, dtype), None
        self.k, self.v = keys_of(k, unit, dtype), keys_of(v, unit, dtype)
        if o.slot is not None:
            self.slot = rows_of(o.slot, unit, dtype, is_narrowed=True)
        self.sets = None
        if "mass" in names:
            assert o.key_sets is not None
            self.sets = o.key_sets.to(dtype).transpose(1, 2).contiguous()
        self.received = None
        if "received" in names:
            n_heads = o.batch * (unit.heads.stop - unit.heads.start)
            self.received = torch.zeros(n_heads, o.key_pos, dtype=dtype, device=q.device)

    def store(self, results: dict[str, Tensor]) -> None:
        """Run through the strips and put what they give into the whole call's results."""
        unit = self.unit
        parts: Parts = defaultdict(list)
        strips = list(unit.strips(self.q.device))
        for strip in strips:
            self._run(strip, parts)
        if not strips:
            return
        rows = slice(strips[0].first, strips[-1].last)
        for name, whole in results.items():
            if name == "received":
                assert self.received is not None
                mine = whole[unit.samples, unit.heads]
                mine.copy_(self.received.view(mine.shape))
            elif parts[name]:
                # [N, G, rows, ...] is [samples, heads, rows, ...]
                mine = whole[unit.samples, unit.heads, rows]
                mine.copy_(torch.cat(parts[name], 2).view(mine.shape))

    def _run(self, strip: Strip, parts: Parts) -> None:
        rows = slice(strip.first, strip.last)
        q = self.q[:, :, rows].flatten(1, 2)
        scores = self.buffers.get("scores", *q.shape[:2], strip.high - strip.low)
        compute_scores(q, self.k[:, strip.keys], self.unit, strip, scores)
        by_group = (self.unit.n_units, -1, strip.last - strip.first)
        found: dict[str, Tensor] = {}
        share = None
        if self.unit.options.is_softmax:
            slot = None if self.slot is None else self.slot[:, :, rows].flatten(1, 2)
            weights, share = self._softmax(scores, slot, found)
        else:
            variant = variant_weights(scores, self.unit, strip)
            weights = variant.weights.view(scores.shape)
            for name in ("lse", "entropy", "max", "sink_mass"):
                found[name] = getattr(variant, name)
        cut_after(weights, self.unit, strip)
        found["out"] = torch.bmm(weights, self.v[:, strip.keys])
        if self.sets is not None:
            flat = weights.view(self.unit.options.batch, -1, weights.shape[-1])
            found["mass"] = (flat @ self.sets[:, strip.keys]).view(*scores.shape[:2], -1)
        if share is not None:
            for name in ("out", "mass"):
                if name in found:
                    found[name] *= share[..., None]
        if self.received is not None:
            by_head = weights.view(len(self.received), -1, weights.shape[-1])
            if share is None:
                self.received[:, strip.keys] += by_head.sum(1)
            else:
                factors = share.reshape(len(self.received), 1, -1)
                self.received[:, strip.keys] += torch.bmm(factors, by_head)[:, 0]
        for name, tensor in found.items():
            if name in self.names:
                # a single key set, or a single value, still has its axis
                last_axes = tensor.shape[2:] if name in ("out", "mass") else ()
                parts[name].append(tensor.reshape(*by_group, *last_axes))

    def _softmax(
        self, scores: Tensor, slot: Tensor | None, found: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Weights without the slot, and the keys' share of each row with it; row statistics."""
        weights, is_dead = softmax_in(scores, self.unit, self.buffers)
        largest = weights.amax(-1)
        lse = scores.amax(-1) - torch.log(largest)
        entropy = None
        if "entropy" in self.names:
            entropy = lse - scores.mul_(weights).sum(-1)
        share = None
        if slot is not None:
            slotted = put_slot(slot, lse, entropy)
            share, lse, entropy = slotted.share, slotted.lse, slotted.entropy
            found["sink_mass"] = slotted.sink_mass
            largest = largest * share
        found["lse"], found["max"] = lse, largest
        if entropy is not None:
            found["entropy"] = entropy
        if is_dead is not None:
            lse.masked_fill_(is_dead, -torch.inf)
            for name in ("entropy", "sink_mass"):
                if name in found:
                    found[name].masked_fill_(is_dead, 0.0)
        return weights, share


@dataclass(frozen=True, eq=False)
class Slotted:
    """Rows into which a slot was put: what the keys keep, what the slot takes, and statistics."""

    share: Tensor
    sink_mass: Tensor
    lse: Tensor
    entropy: Tensor | None


def put_slot(slot: Tensor, lse: Tensor, entropy: Tensor | None) -> Slotted:
    """Put a slot's logit into rows of which lse and entropy over the keys are known."""
    share, sink_mass = torch.sigmoid(lse - slot), torch.sigmoid(slot - lse)
    if entropy is not None:
        entropy = share * entropy + torch.special.entr(share) + torch.special.entr(sink_mass)
    return Slotted(share, sink_mass, torch.logaddexp(lse, slot), entropy)
