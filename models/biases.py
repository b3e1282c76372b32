"""Biases that can be left out and still be read."""

import torch
from torch import nn


def add_bias(module: nn.Module, name: str, *shape: int, is_learned: bool) -> None:
    """Give ``module`` a bias of this shape: a parameter, or zeros, neither trained nor saved.

    So a model without biases still answers for ``b_Q`` or ``b_out``.
    """
    if is_learned:
        module.register_parameter(name, nn.Parameter(torch.zeros(*shape)))
    else:
        module.register_buffer(name, torch.zeros(*shape), persistent=False)
