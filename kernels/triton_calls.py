"""The launches of attention: for every kernel its arguments and how many programs it takes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from interp.kernels import triton_arguments as arguments
from interp.kernels.triton_launch import Call, Problem


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _padded_sets(n_sets: int) -> int:
    return 1 << max(0, (n_sets - 1).bit_length())


def forward_call(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    results: arguments.Results,
    slot: Tensor | None,
) -> Call:
    """Output and row statistics."""
    o = p.options
    tensors = {
        "q": arguments.operand(q),
        "k": arguments.operand(k),
        "v": arguments.operand(v),
        "out": arguments.operand(out),
        "results": results,
        "slot": slot,
        "key_sets": p.key_sets,
        "N_SETS": p.n_sets,
        "S_PAD": _padded_sets(p.n_sets),
    }
    has_statistics = any(x is not None for x in (results.entropy, results.peak, results.mass))
    return p.call(
        "forward",
        lambda b: _blocks(o.query_pos, b.rows) * o.batch * o.n_heads,
        tensors,
        has_statistics=has_statistics,
    )


def columns_call(p: Problem, q: Tensor, k: Tensor, lse: Tensor, received: Tensor) -> Call:
    """The received mass."""
    o = p.options
    tensors = {
        "q": arguments.operand(q),
        "k": arguments.operand(k),
        "lse": lse,
        "received": received,
    }
    return p.call(
        "columns",
        lambda b: _blocks(o.key_pos, b.keys) * o.batch * o.n_heads,
        tensors,
        has_values=False,
    )


def constant_call(
    p: Problem,
    q: Tensor,
    k: Tensor,
    out: Tensor,
    grad_out: Tensor,
    constant: Tensor,
    results: arguments.Results,
    grads: arguments.Grads,
) -> Call:
    """The row constants of the backward."""
    o = p.options
    tensors = {
        "q": arguments.operand(q),
        "k": arguments.operand(k),
        "out": arguments.operand(out),
        "grad_out": arguments.operand(grad_out),
        "constant": constant,
        "results": results,
        "grads": grads,
        "N_SETS": 0 if grads.mass is None else p.n_sets,
        "S_PAD": _padded_sets(p.n_sets),
    }
    return p.call(
        "constant",
        lambda b: _blocks(o.query_pos, b.rows) * o.batch * o.n_heads,
        tensors,
    )


@dataclass(frozen=True, eq=False)
class Backward:
    """What the three gradient kernels share."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    upstream: arguments.Upstream

    @property
    def has_statistics(self) -> bool:
        """Whether a gradient came for a statistic other than lse."""
        u = self.upstream
        return any(x is not None for x in (u.entropy, u.peak, u.mass, u.received))

    def tensors(self, p: Problem) -> dict[str, Any]:
        """Their common arguments; without a gradient of the masses there are no sets to load."""
        return {
            "q": arguments.operand(self.q),
            "k": arguments.operand(self.k),
            "v": arguments.operand(self.v),
            "grad_out": arguments.operand(self.grad_out),
            "upstream": self.upstream,
            "key_sets": p.key_sets,
            "N_SETS": 0 if self.upstream.mass is None else p.n_sets,
        }


def dkv_call(p: Problem, back: Backward, grad_k: Tensor, grad_v: Tensor) -> Call:
    """Gradients of keys and values."""
    o = p.options
    tensors = {
        **back.tensors(p),
        "grad_k": arguments.operand(grad_k),
        "grad_v": arguments.operand(grad_v),
        "scale": o.scale,
    }
    return p.call(
        "dkv",
        lambda b: _blocks(o.key_pos, b.keys) * o.batch * o.n_key_value_heads,
        tensors,
        has_statistics=back.has_statistics,
    )


def dq_call(p: Problem, back: Backward, grad_q: Tensor) -> Call:
    """Gradients of queries."""
    o = p.options
    tensors = {**back.tensors(p), "grad_q": arguments.operand(grad_q), "scale": o.scale}
    return p.call(
        "dq",
        lambda b: _blocks(o.query_pos, b.rows) * o.batch * o.n_heads,
        tensors,
        has_statistics=back.has_statistics,
    )


def dbias_call(p: Problem, back: Backward, grad_bias: Tensor) -> Call:
    """Gradient of a bias, into a contiguous tensor whose shared axes have length 1."""
    o = p.options
    batch, n_heads, n_rows, n_columns = grad_bias.shape
    is_shared = {
        "SUM_BATCH": batch < o.batch,
        "SUM_HEADS": n_heads < o.n_heads,
        "SUM_ROWS": n_rows < o.query_pos,
        "SUM_KEYS": n_columns < o.key_pos,
    }
    tensors = {
        **back.tensors(p),
        "grad_bias": grad_bias,
        "n_batches": o.batch,
        **is_shared,
    }
    return p.call(
        "dbias",
        lambda b: batch * n_heads * _blocks(n_rows, b.rows) * _blocks(n_columns, b.keys),
        tensors,
        has_statistics=back.has_statistics,
    )


def rows_call(
    p: Problem,
    q: Tensor,
    k: Tensor,
    slot: Tensor | None,
    heads: Tensor,
    rows: Tensor,
    pattern: Tensor,
) -> Call:
    """Chosen rows of the pattern of chosen heads."""
    tensors = {
        "q": arguments.operand(q),
        "k": arguments.operand(k),
        "slot": slot,
        "heads": heads,
        "rows": rows,
        "pattern": pattern,
        "n_chosen_heads": len(heads),
        "n_chosen_rows": len(rows),
    }
    return p.call(
        "rows",
        lambda b: _blocks(len(rows), b.rows) * p.options.batch * len(heads),
        tensors,
        has_values=False,
    )
