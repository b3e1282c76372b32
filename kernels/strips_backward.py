"""Backward pass of strips: gradients through the output and every statistic.

Letters as in `interp.kernels.strips_forward`; H_i the entropy of row i, m_i its max, g a gradient.
With P = e^(S - lse) computed again, the gradient that reaches a weight and a score are

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
from interp.kernels.scores import distances, knocked_out
from interp.kernels.strip_plan import Strip, Unit, plan
from interp.kernels.strips_forward import (
    LOWEST,
    Buffers,
    Operands,
    compute_scores,
    operands,
    per_head,
    rows_of,
    slot_rows,
    variant_weights,
)


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
    o = options

    def zeros(x: Tensor | None, is_needed: bool) -> Tensor | None:
        return (
            torch.zeros(x.shape, dtype=dtype, device=x.device)
            if is_needed and x is not None
            else None
        )

    total = Gradients(
        q=torch.zeros(q.shape, dtype=dtype, device=q.device),
        k=torch.zeros(k.shape, dtype=dtype, device=k.device),
        v=torch.zeros(v.shape, dtype=dtype, device=v.device),
        bias=zeros(o.bias, needed[3]),
        alibi=zeros(o.alibi, needed[4]),
        slot=zeros(o.slot, needed[5]),
    )
    given = {name: grad for name, grad in upstream.items() if grad is not None}
    buffers = Buffers(q, dtype)
    n_threads = torch.get_num_threads() if q.device.type == "cpu" else 1
    for unit in plan(o, element_size=dtype.itemsize, n_threads=n_threads):
        ours = operands(k, v, unit, dtype)
        for strip in unit.strips(q.device):
            _Backward(unit, strip, ours, saved, given, total, buffers).run(q)
    inputs = (q, k, v, o.bias, o.alibi, o.slot)
    found = (total.q, total.k, total.v, total.bias, total.alibi, total.slot)
    return tuple(
        grad.to(x.dtype) if is_needed and x is not None and grad is not None else None
        for grad, x, is_needed in zip(found, inputs, needed, strict=False)
    )


@dataclass(frozen=True, eq=False)
class _Backward:
    """The backward pass of one strip."""

    unit: Unit
    strip: Strip
    ours: Operands
    saved: Saved
    given: Mapping[str, Tensor]
    total: Gradients
    buffers: Buffers

    def run(self, q: Tensor) -> None:
        unit, strip, o = self.unit, self.strip, self.unit.options
        dtype = self.ours.k.dtype
        k, v = self.ours.k[:, strip.keys], self.ours.v[:, strip.keys]
        rows = rows_of(q, unit, strip, dtype)
        shape = (*rows.shape[:2], strip.high - strip.low)
        scores, dots = compute_scores(rows, k, unit, strip, self.buffers.get("scores", *shape))
        d_out = self._rows("out", dtype)
        d_weights = self._gradient_of_weights(d_out, v, shape)
        if o.is_softmax:
            weights, d_scores = self._softmax(scores, d_weights)
        else:
            weights, d_scores = self._variant(scores, d_weights)
        if d_out is not None:
            self._add_keys(self.total.v, weights.transpose(1, 2) @ d_out)
        d_dots = d_scores if dots is None else self._through_extras(d_scores, dots)
        d_rows = torch.bmm(d_dots, k) * o.scale
        block = self.total.q[unit.samples, unit.heads, strip.first : strip.last]
        block.copy_(d_rows.view(block.shape))
        self._add_keys(self.total.k, torch.bmm(d_dots.transpose(1, 2), rows) * o.scale)

    def _rows(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The strip's rows of an upstream gradient, [N, M, ...]."""
        grad = self.given.get(name)
        return None if grad is None else rows_of(grad, self.unit, self.strip, dtype)

    def _saved(self, x: Tensor | None) -> Tensor:
        assert x is not None
        return rows_of(x, self.unit, self.strip, x.dtype)

    def _add_keys(self, total: Tensor, found: Tensor) -> None:
        unit = self.unit
        block = total[unit.samples, unit.key_value_heads, self.strip.keys]
        block += found.view(block.shape)

    def _gradient_of_weights(
        self, d_out: Tensor | None, v: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        unit, strip, o = self.unit, self.strip, self.unit.options
        d_weights = self.buffers.get("d_weights", *shape)
        if d_out is None:
            d_weights.zero_()
        else:
            torch.bmm(d_out, v.transpose(1, 2), out=d_weights)
        d_mass = self._rows("mass", v.dtype)
        if d_mass is not None:
            assert o.key_sets is not None
            sets = o.key_sets[:, :, strip.keys].to(v.dtype)
            d_weights += (d_mass.view(o.batch, -1, d_mass.shape[-1]) @ sets).view(shape)
        d_received = self.given.get("received")
        if d_received is not None:
            mine = d_received[unit.samples, unit.heads, strip.keys].to(v.dtype)
            per_head(d_weights, unit).add_(mine[:, :, None, :])
        if o.is_cut_after:
            self._cut(d_weights)
        return d_weights

    def _cut(self, x: Tensor) -> None:
        cut = knocked_out(self.unit.options, self.strip)
        if cut is not None:
            per_head(x, self.unit).masked_fill_(cut, 0.0)

    def _softmax(self, scores: Tensor, d_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weights as used and the gradient of the scores; both arguments are overwritten."""
        lowest = LOWEST[scores.dtype]
        lse = self._saved(self.saved.lse)
        is_dead = lse == -torch.inf
        lse = lse.masked_fill(is_dead, 0.0)
        logs = scores.sub_(lse[..., None]).clamp_(min=lowest)
        weights = torch.exp(logs, out=self.buffers.get("weights", *scores.shape))
        delta = (weights * d_weights).sum(-1)
        slot = slot_rows(self.unit, self.strip, scores)
        d_sink, d_lse = self._rows("sink_mass", scores.dtype), self._rows("lse", scores.dtype)
        d_max, d_entropy = self._rows("max", scores.dtype), self._rows("entropy", scores.dtype)
        log_slot = slot_weight = None
        if slot is not None:
            log_slot = (slot - lse).clamp_min(lowest)
            slot_weight = torch.exp(log_slot).masked_fill(is_dead, 0.0)
            if d_sink is not None:
                delta = delta + slot_weight * d_sink
        if d_lse is not None:
            delta = delta - d_lse
        peak = d_peak = None
        if d_max is not None:
            d_peak = d_max * self._saved(self.saved.max)
            delta = delta + d_peak
            peak = logs.argmax(-1, keepdim=True)
        if slot_weight is not None and log_slot is not None and self.total.slot is not None:
            inner = -delta if d_sink is None else d_sink - delta
            if d_entropy is not None:
                inner = inner - d_entropy * (log_slot + self._saved(self.saved.entropy))
            block = self.total.slot[
                self.unit.samples, self.unit.heads, self.strip.first : self.strip.last
            ]
            block.copy_((slot_weight * inner).view(block.shape))
        if d_entropy is not None:
            entropy = self._saved(self.saved.entropy)
            logs.add_(entropy[..., None]).mul_(d_entropy[..., None])
            d_weights.sub_(logs)
        d_scores = d_weights.sub_(delta[..., None]).mul_(weights)
        if peak is not None and d_peak is not None:
            d_scores.scatter_add_(-1, peak, d_peak[..., None])
        if self.unit.options.is_cut_after:
            self._cut(weights)
        return weights, d_scores

    def _variant(self, scores: Tensor, d_weights: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the other variants, by autograd over the definition of this one strip."""
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            rows = variant_weights(leaf, self.unit, self.strip)
        targets: list[Tensor] = [rows.weights]
        grads: list[Tensor] = [d_weights.view(rows.weights.shape)]
        for name in ("lse", "entropy", "max"):
            grad = self._rows(name, scores.dtype)
            if grad is not None:
                targets.append(getattr(rows, name))
                grads.append(grad.view(targets[-1].shape))
        (d_scores,) = torch.autograd.grad(targets, leaf, grads)
        return rows.weights.detach().view(scores.shape), d_scores

    def _through_extras(self, d_scores: Tensor, dots: Tensor) -> Tensor:
        """From scores back to ``scale * q k``, on the way adding to bias and ALiBi's slopes."""
        unit, strip, o = self.unit, self.strip, self.unit.options
        grad = per_head(d_scores, unit)
        if o.random_heads is not None:
            grad = grad.masked_fill(o.random_heads[strip.heads][:, None, None], 0.0)
        if o.temperature is not None:
            grad = grad * o.temperature.to(grad.dtype)[strip.heads][:, None, None]
        if self.total.bias is not None:
            self._add_to_bias(grad)
        if self.total.alibi is not None:
            slopes = -(grad * distances(o, strip).abs()).sum((0, 2, 3))
            self.total.alibi[unit.heads] += slopes
        if o.softcap is not None:
            tangent = torch.tanh(per_head(dots, unit) * (o.scale / o.softcap))
            grad = grad * (1.0 - tangent * tangent)
        return grad.reshape(d_scores.shape)

    def _add_to_bias(self, grad: Tensor) -> None:
        """Sum [samples, heads, R, W] over the axes along which the bias is broadcast."""
        total = self.total.bias
        assert total is not None
        rows = slice(self.strip.first, self.strip.last)
        cuts = (self.unit.samples, self.unit.heads, rows, self.strip.keys)
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
