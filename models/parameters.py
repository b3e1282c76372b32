"""How weights lie in memory, and biases that can be left out and still be read.

Weights have TransformerLens' shapes, inputs before outputs, and nn.Linear's layout, outputs by
inputs: a matrix product reads them as fast as nn.Linear's, through views and without a copy.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def empty_weight(n_in: int, n_out: int) -> Float[Tensor, "n_in n_out"]:
    """Uninitialized weight; its transpose is contiguous."""
    return torch.empty(n_out, n_in).t()


def empty_projection(
    n_heads: int, d_model: int, d_head: int
) -> Float[Tensor, "head d_model d_head"]:
    """Uninitialized weight into heads; as [head * d_head, d_model] it is contiguous."""
    return torch.empty(n_heads, d_head, d_model).transpose(1, 2)


def empty_output(n_heads: int, d_head: int, d_model: int) -> Float[Tensor, "head d_head d_model"]:
    """Uninitialized weight out of heads; as [d_model, head * d_head] it is contiguous."""
    return torch.empty(d_model, n_heads, d_head).permute(1, 2, 0)


def add_bias(module: nn.Module, name: str, *shape: int, is_learned: bool) -> None:
    """Give ``module`` a bias of this shape: a parameter, or zeros, neither trained nor saved.

    So a model without biases still answers for ``b_Q`` or ``b_out``.
    """
    if is_learned:
        module.register_parameter(name, nn.Parameter(torch.zeros(*shape)))
    else:
        module.register_buffer(name, torch.zeros(*shape), persistent=False)
