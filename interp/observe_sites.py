"""Where a model calls attention: which modules, which layers, how many heads.

transformers' attention modules fetch their implementation with
``ALL_ATTENTION_FUNCTIONS.get_interface(...)``; a module whose class does so is a *site*. Sites
whose names differ in numbers only form a *stack*: the encoder's self-attention, the decoder's, the
cross-attention.
"""

import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_HEAD_COUNTS = (
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "n_head",
    "num_query_heads",
    "num_q_heads",
)
_CROSS_NAMES = ("cross", "encdec", "encoder_attn", "encoder_attention", "enc_attn", "enc_dec")


@dataclass(frozen=True)
class AttentionSite:
    """One attention module.

    name: its path in the model.
    stack: "self" where the model has one kind of attention; else "encoder", "decoder", "cross", or
        the path pattern of its stack.
    layer: the layer's number within the stack, counted as the model counts.
    n_heads: query heads, None where the module does not say.
    takes_sinks: whether it hands learned sinks to attention.
    """

    name: str
    stack: str
    layer: int
    n_heads: int | None
    takes_sinks: bool


def _source(module: nn.Module) -> str:
    return _class_source(type(module))  # type: ignore[arg-type]  # classes can be hashed


@functools.cache
def _class_source(module_class: type) -> str:
    """Source of a class and of those it inherits from; "" for code typed at a prompt."""
    parts = []
    for base in module_class.__mro__:
        if base is nn.Module:
            break
        try:
            parts.append(inspect.getsource(base))
        except (OSError, TypeError):  # no source file: then nothing can be read off it
            continue
    return "\n".join(parts)


def is_attention_site(module: nn.Module) -> bool:
    """Whether this module's class calls attention through transformers' AttentionInterface."""
    is_model = isinstance(module, PreTrainedModel)  # its base class speaks of interfaces too
    return not is_model and ".get_interface(" in _source(module)


def find_sites(model: nn.Module) -> dict[nn.Module, AttentionSite]:
    """Every site of a model, in the order of its modules."""
    found = [(name, m) for name, m in model.named_modules() if is_attention_site(m)]
    stacks: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in found:
        stacks.setdefault(_pattern(name), []).append((name, module))
    labels = _stack_labels(list(stacks), is_encoder_decoder=_is_encoder_decoder(model))
    sites = {}
    for pattern, members in stacks.items():
        for layer, (name, module) in zip(_layer_numbers(members), members, strict=True):
            sites[module] = AttentionSite(
                name=name,
                stack=labels[pattern],
                layer=layer,
                n_heads=_n_heads(module),
                takes_sinks=bool(re.search(r"\b(s_aux|sinks)=", _source(module))),
            )
    return sites


def unserved_attention(model: nn.Module, sites: dict[nn.Module, AttentionSite]) -> list[str]:
    """Paths of modules that look like attention and do not go through the interface.

    They look like it when their class is named so, they own projections, and they are neither part
    of a site nor around one.
    """
    inside = {id(child) for site in sites for child in site.modules()}
    names = []
    for name, module in model.named_modules():
        if "attention" not in type(module).__name__.lower() or id(module) in inside:
            continue
        if any(child in sites for child in module.modules()):
            continue
        projections = [
            c for c in module.children() if isinstance(getattr(c, "weight", None), nn.Parameter)
        ]
        if len(projections) >= 2:
            names.append(name)
    return names


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _stack_labels(patterns: list[str], *, is_encoder_decoder: bool) -> dict[str, str]:
    labels = {}
    for pattern in patterns:
        parts = pattern.lower().split(".")
        if any(hint in pattern.lower().split("*")[-1] for hint in _CROSS_NAMES):
            labels[pattern] = "cross"
        elif is_encoder_decoder and "encoder" in parts:
            labels[pattern] = "encoder"
        elif is_encoder_decoder and "decoder" in parts:
            labels[pattern] = "decoder"
        else:
            labels[pattern] = "self"
    counts = list(labels.values())
    return {p: label if counts.count(label) == 1 else p for p, label in labels.items()}


def _layer_numbers(members: list[tuple[str, nn.Module]]) -> list[int]:
    """The model's own layer numbers where it has them, else the number in the path, else order."""
    own = [getattr(module, "layer_idx", None) for _, module in members]
    if all(isinstance(n, int) and n >= 0 for n in own) and len(set(own)) == len(own):
        return [int(n) for n in own if n is not None]
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name, _ in members]
    for column in zip(*numbers, strict=False):
        if len(set(column)) == len(members):
            return list(column)
    return list(range(len(members)))


def _n_heads(module: nn.Module) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in _HEAD_COUNTS:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _is_encoder_decoder(model: nn.Module) -> bool:
    configs = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    return any(getattr(config, "is_encoder_decoder", False) for config in configs)


def pretrained_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The transformers models in a module tree, itself included, outermost first."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            yield module


def model_name(model: Any) -> str:
    """What to call a model in a message: the class of the transformers model within."""
    if isinstance(model, nn.Module):
        for inner in pretrained_models(model):
            return type(inner).__name__
    return type(model).__name__
