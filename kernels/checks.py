"""Small checks whose messages name the argument, what came, what was expected and what to do."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

INTEGER_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INT32_MAX = (1 << 31) - 1


def describe(value: object) -> str:
    """What came, in a few words."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def check_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {describe(value)}, expected a torch.Tensor")
    return value


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {describe(value)}, expected True or False")
    return value


def check_int(name: str, value: object, *, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {describe(value)}, expected an int")
    if least is not None and value < least:
        raise ValueError(f"{name}: got {value}, expected an int of at least {least}")
    if abs(value) > INT32_MAX:
        raise ValueError(f"{name}: got {value}, expected a number of at most 31 bits")
    return value


def check_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {describe(value)}, expected a number")
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{name}: got {number}, expected a finite number")
    return number


def check_device(name: str, value: Tensor, q: Tensor) -> Tensor:
    if value.device != q.device:
        raise ValueError(
            f"{name}: is on {value.device} and q on {q.device}; move one with .to(device)"
        )
    return value


def check_integers(name: str, value: object, q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An integer tensor of this shape (a first axis of 1 is expanded), as int32."""
    tensor = check_device(name, check_tensor(name, value), q)
    if tensor.dtype not in INTEGER_TYPES:
        raise TypeError(f"{name}: got {describe(tensor)}, expected integers")
    tensor = expand(name, tensor, shape)
    if tensor.dtype == torch.int64 and tensor.device.type == "cpu" and tensor.numel():
        low, high = tensor.aminmax()
        if low < -INT32_MAX or high > INT32_MAX:
            raise ValueError(f"{name}: has values up to {int(high)}, expected at most 31 bits")
    return tensor.to(torch.int32)


def check_floats(name: str, value: object, q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A floating tensor of q's type or float32, expanded to this shape."""
    return expand(name, check_float_type(name, value, q), shape)


def check_float_type(name: str, value: object, q: Tensor) -> Tensor:
    """A floating tensor of q's type or float32."""
    tensor = check_device(name, check_tensor(name, value), q)
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: got {describe(tensor)}, expected floating-point numbers")
    if tensor.dtype not in (q.dtype, torch.float32):
        raise ValueError(
            f"{name}: is {tensor.dtype} and q {q.dtype}; expected the type of q or float32: "
            f"use {name}.to(q.dtype)"
        )
    return tensor


def expand(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor expanded to a shape of the same rank, or an error that shows both."""
    return check_broadcast(name, tensor, shape).expand(shape)


def check_broadcast(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor as it is, if it has this shape or 1s in its place."""
    fits = tensor.ndim == len(shape) and all(
        have in (1, want) for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {shape} or 1s in it")
    return tensor


def check_scores(name: str, value: object, q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor on [batch, head, query_pos, key_pos]; axes left out in front become 1s."""
    tensor = check_device(name, check_tensor(name, value), q)
    if not 2 <= tensor.ndim <= 4:
        raise ValueError(
            f"{name}: got {describe(tensor)}, expected [query_pos, key_pos], "
            "[head_index, query_pos, key_pos] or [batch, head_index, query_pos, key_pos]"
        )
    return check_broadcast(name, tensor[(None,) * (4 - tensor.ndim)], shape)


def check_heads(name: str, value: object, n_heads: int) -> Mapping[int, Any]:
    """A mapping from head indices to values."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: got {describe(value)}, expected a mapping from a head's index to its value"
        )
    for head in value:
        if isinstance(head, bool) or not isinstance(head, int):
            raise TypeError(f"{name}: has the key {head!r}, expected the index of a head")
        if not 0 <= head < n_heads:
            raise ValueError(f"{name}: names head {head}, expected 0 to {n_heads - 1}")
    return value
