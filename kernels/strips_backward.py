"""Backward pass of strips: gradients through the output and every statistic.

Letters as in `interp.kernels.strips_forward`; H_i the entropy of row i, m_i its max, g a gradient.
With the weights P computed again, the gradient that reaches a weight and a score are

    gP_ij = gout_i . v_j  +  sum_s gmass_is [j in s]  +  greceived_j           (0 where cut after)
    gS_ij = P_ij (gP_ij - delta_i - gH_i (log P_ij + H_i))  +  gmax_i m_i [j is the largest key]
    delta_i = sum_j P_ij gP_ij  +  P_slot gsink_i  -  glse_i  +  gmax_i m_i

and the slot, whose weight is P_slot = e^(slot - lse), gets the same with no value:

    gslot_i = P_slot (gsink_i - delta_i - gH_i (log P_slot + H_i))
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.kernels.options import AttentionOptions, statistics_dtype
from interp.kernels.scores import distances
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

# A log-weight below this belongs to a weight of 0, in float64 too; products with it stay finite.
_FLOOR = -1e4


@dataclass(frozen=True, eq=False)
class Saved:
    """What the forward pass kept: [B, H, Q] each."""

    lse: Tensor
    entropy: Tensor | None
    max: Tensor | None


@dataclass(frozen=True, eq=False)
class Gradients:
    """Where the gradients of the whole call gather; None where none is needed."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi: Tensor | None
    slot: Tensor | None


def compute_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    saved: Saved,
    upstream: Mapping[str, Tensor | None],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, alibi and slot, given those of the results in ``upstream``."""
    dtype = statistics_dtype(q.dtype)
    inputs = (q, k, v, options.bias, options.alibi, options.slot)

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=dtype, device=x.device)

    def zeros_where_needed(place: int) -> Tensor | None:
        x = inputs[place]
        return zeros(x) if needed[place] and x is not None else None

    total = Gradients(zeros(q), zeros(k), zeros(v), *map(zeros_where_needed, (3, 4, 5)))
    given = {name: grad for name, grad in upstream.items() if grad is not None}
    buffers = Buffers(q.device, dtype)
    n_threads = torch.get_num_threads() if q.device.type == "cpu" else 1
    for unit in plan(options, element_size=dtype.itemsize, n_threads=n_threads):
        _Backward(unit, q, k, v, saved, given, total, buffers).run()
    found = (total.q, total.k, total.v, total.bias, total.alibi, total.slot)
    return tuple(
        grad.to(x.dtype) if is_needed and x is not None and grad is not None else None
        for grad, x, is_needed in zip(found, inputs, needed, strict=False)
    )


class _Backward:
    """The backward pass of one unit."""

    def __init__(
        self,
        unit: Unit,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        saved: Saved,
        given: Mapping[str, Tensor],
        total: Gradients,
        buffers: Buffers,
    ):
        self.unit, self.total, self.buffers = unit, total, buffers
        o, dtype = unit.options, statistics_dtype(q.dtype)
        self.q = rows_of(q, unit, dtype)
        self.k, self.v = keys_of(k, unit, dtype), keys_of(v, unit, dtype)
        kept = {"lse": saved.lse, "entropy": saved.entropy, "max": saved.max}
        # [N, G, Q, ...] of what is known of each row, and of the gradients that reach it
        self.kept = {n: rows_of(x, unit, dtype) for n, x in kept.items() if x is not None}
        self.given = {n: rows_of(g, unit, dtype) for n, g in given.items() if n != "received"}
        if o.slot is not None:
            self.kept["slot"] = rows_of(o.slot, unit, dtype, is_narrowed=True)
        self.sets = None if o.key_sets is None else o.key_sets.to(dtype)
        self.received = None
        if "received" in given:
            self.received = given["received"][unit.samples, unit.heads].to(dtype)
        self.d_k, self.d_v = torch.zeros_like(self.k), torch.zeros_like(self.v)

    def run(self) -> None:
        unit, total = self.unit, self.total
        for strip in unit.strips(self.q.device):
            self._run(strip)
        for whole, mine in ((total.k, self.d_k.mul_(unit.options.scale)), (total.v, self.d_v)):
            block = whole[unit.samples, unit.key_value_heads]
            block.copy_(mine.view(block.shape))

    def _run(self, strip: Strip) -> None:
        unit, o = self.unit, self.unit.options
        k, v = self.k[:, strip.keys], self.v[:, strip.keys]
        rows = slice(strip.first, strip.last)
        q = self.q[:, :, rows].flatten(1, 2)
        given = {name: grad[:, :, rows].flatten(1, 2) for name, grad in self.given.items()}
        kept = {name: x[:, :, rows].flatten(1, 2) for name, x in self.kept.items()}
        scores = self.buffers.get("scores", *q.shape[:2], strip.high - strip.low)
        dots = compute_scores(q, k, unit, strip, scores)
        d_weights = self._gradient_of_weights(given, v, strip, scores.shape)
        if o.is_softmax:
            weights, d_scores = self._softmax(scores, d_weights, given, kept, strip)
        else:
            weights, d_scores = self._variant(scores, d_weights, given, strip)
        if "out" in given:
            self.d_v[:, strip.keys].baddbmm_(weights.transpose(1, 2), given["out"])
        d_dots = d_scores if dots is None else self._through_extras(d_scores, dots, strip)
        self._store_rows(self.total.q, torch.bmm(d_dots, k).mul_(o.scale), strip)
        self.d_k[:, strip.keys].baddbmm_(d_dots.transpose(1, 2), q)

    def _store_rows(self, whole: Tensor, found: Tensor, strip: Strip) -> None:
        block = whole[self.unit.samples, self.unit.heads, strip.first : strip.last]
        block.copy_(found.view(block.shape))

    def _gradient_of_weights(
        self, given: Mapping[str, Tensor], v: Tensor, strip: Strip, shape: torch.Size
    ) -> Tensor:
        d_weights = self.buffers.get("d_weights", *shape)
        if "out" in given:
            torch.bmm(given["out"], v.transpose(1, 2), out=d_weights)
        else:
            d_weights.zero_()
        if "mass" in given:
            assert self.sets is not None
            d_mass, sets = given["mass"], self.sets[:, :, strip.keys]
            d_weights += (d_mass.reshape(len(sets), -1, sets.shape[1]) @ sets).view(shape)
        if self.received is not None:
            self.unit.per_head(d_weights).add_(self.received[:, :, None, strip.keys])
        cut_after(d_weights, self.unit, strip)
        return d_weights

    def _softmax(
        self,
        scores: Tensor,
        d_weights: Tensor,
        given: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        strip: Strip,
    ) -> tuple[Tensor, Tensor]:
        """Weights as used and the gradient of the scores; both strips are overwritten."""
        weights, is_dead = softmax_in(scores, self.unit, self.buffers)
        lse = kept["lse"]
        if is_dead is not None:
            lse = lse.masked_fill(is_dead, 0.0)
        log_slot = slot_weight = None
        if "slot" in kept:
            log_keys = scores.amax(-1) - torch.log(weights.amax(-1))
            log_slot = kept["slot"] - lse
            slot_weight = torch.exp(log_slot)
            if is_dead is not None:
                slot_weight.masked_fill_(is_dead, 0.0)
                log_keys.masked_fill_(is_dead, 0.0)
            weights.mul_(torch.exp(log_keys - lse)[..., None])
        delta = torch.einsum("nmw,nmw->nm", weights, d_weights)
        if slot_weight is not None and "sink_mass" in given:
            delta = delta + slot_weight * given["sink_mass"]
        if "lse" in given:
            delta = delta - given["lse"]
        peak = d_peak = None
        if "max" in given:
            d_peak = given["max"] * kept["max"]
            delta = delta + d_peak
            peak = scores.argmax(-1, keepdim=True)
        if log_slot is not None and slot_weight is not None and self.total.slot is not None:
            inner = given["sink_mass"] - delta if "sink_mass" in given else -delta
            if "entropy" in given:
                inner = inner - given["entropy"] * (log_slot + kept["entropy"]).clamp_min(_FLOOR)
            self._store_rows(self.total.slot, slot_weight * inner, strip)
        if "entropy" in given:
            surprise = scores.sub_((lse - kept["entropy"])[..., None]).clamp_(min=_FLOOR)
            d_weights.addcmul_(surprise, given["entropy"][..., None], value=-1.0)
        d_scores = d_weights.sub_(delta[..., None]).mul_(weights)
        if peak is not None and d_peak is not None:
            d_scores.scatter_add_(-1, peak, d_peak[..., None])
        cut_after(weights, self.unit, strip)
        return weights, d_scores

    def _variant(
        self, scores: Tensor, d_weights: Tensor, given: Mapping[str, Tensor], strip: Strip
    ) -> tuple[Tensor, Tensor]:
        """The same for the other variants, by autograd over the definition of this one strip."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            rows = variant_weights(leaf, self.unit, strip)
        targets: list[Tensor] = [rows.weights]
        grads: list[Tensor] = [d_weights.view(rows.weights.shape)]
        for name in ("lse", "entropy", "max"):
            if name in given:
                targets.append(getattr(rows, name))
                grads.append(given[name].reshape(targets[-1].shape))
        (d_scores,) = torch.autograd.grad(targets, leaf, grads)
        weights = rows.weights.detach().view(scores.shape)
        cut_after(weights, self.unit, strip)
        return weights, d_scores

    def _through_extras(self, d_scores: Tensor, dots: Tensor, strip: Strip) -> Tensor:
        """From scores back to ``scale * q k``, on the way adding to bias and ALiBi's slopes."""
        unit, o = self.unit, self.unit.options
        grad = unit.per_head(d_scores)
        if o.random_heads is not None:
            grad = grad.masked_fill(o.random_heads[strip.heads][:, None, None], 0.0)
        if o.temperature is not None:
            grad = grad * o.temperature.to(grad.dtype)[strip.heads][:, None, None]
        if self.total.bias is not None:
            self._add_to_bias(self.total.bias, grad, strip)
        if self.total.alibi is not None:
            slopes = -(grad * distances(o, strip).abs()).sum((0, 2, 3))
            self.total.alibi[unit.heads] += slopes
        if o.softcap is not None:
            tangent = torch.tanh(unit.per_head(dots) * (o.scale / o.softcap))
            grad = grad * (1.0 - tangent * tangent)
        return grad.reshape(d_scores.shape)

    def _add_to_bias(self, total: Tensor, grad: Tensor, strip: Strip) -> None:
        """Sum [samples, heads, R, W] over the axes along which the bias is broadcast."""
        rows = slice(strip.first, strip.last)
        cuts = (self.unit.samples, self.unit.heads, rows, strip.keys)
        summed = tuple(axis for axis in range(4) if total.shape[axis] == 1)
        if summed:
            grad = grad.sum(summed, keepdim=True)
        block = total[
            tuple(
                cut if length > 1 else slice(None)
                for cut, length in zip(cuts, total.shape, strict=True)
            )
        ]
        block += grad
