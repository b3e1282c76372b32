"""Give one model another attention function, and take it back, without touching any other model.

transformers keeps the name of a model's attention in its config, and two models that were built
from one config object share it. So the config is never written to: for as long as the switch is
on, the model's modules hold copies of their configs, and only the copies carry the new name.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from interp.observe_sites import is_attention_site, pretrained_models

_NAME = "interp_observation_"
_FIELD = "_attn_implementation_internal"
_numbers = itertools.count(1)


def is_switched(model: nn.Module) -> bool:
    """Whether some part of this model runs on an attention function of ours already."""
    return any(
        str(vars(config).get(_FIELD)).startswith(_NAME)
        for module in model.modules()
        for config in _held_configs(module).values()
    )


@contextmanager
def switched_attention(
    model: nn.Module, attend: Callable[..., Any], make_mask: Callable[..., Any]
) -> Iterator[None]:
    """Inside the block every attention module of ``model`` calls ``attend`` on ``make_mask`` masks.

    Changes that the block makes to the model's config are kept.
    """
    name = f"{_NAME}{next(_numbers)}"
    copies: dict[int, _Copy] = {}
    held: list[tuple[nn.Module, str, _Copy]] = []
    try:
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, make_mask)
        for module in model.modules():
            for attribute, config in _held_configs(module).items():
                held.append((module, attribute, _copied(config, copies)))
        for entry in copies.values():
            entry.link(copies)
        unable = _configs_without_interface(model)
        for module, attribute, entry in held:
            vars(module)[attribute] = entry.copy
        for key, entry in copies.items():
            if key not in unable:
                vars(entry.copy)[_FIELD] = name
        yield
    finally:
        for module, attribute, entry in held:
            if vars(module).get(attribute) is entry.copy:
                vars(module)[attribute] = entry.original
        for entry in copies.values():
            entry.write_back(name)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _held_configs(module: nn.Module) -> dict[str, PretrainedConfig]:
    return {k: v for k, v in vars(module).items() if isinstance(v, PretrainedConfig)}


class _Copy:
    """A config, its shallow copy, and what the copy held when it was made."""

    def __init__(self, original: PretrainedConfig) -> None:
        self.original = original
        self.copy = copy.copy(original)
        self.born: dict[str, Any] = {}

    def link(self, copies: "dict[int, _Copy]") -> None:
        """Let the copy hold the copies of its sub-configs."""
        for attribute, value in vars(self.copy).items():
            if isinstance(value, PretrainedConfig):
                vars(self.copy)[attribute] = copies[id(value)].copy
        self.born = dict(vars(self.copy))

    def write_back(self, name: str) -> None:
        """Bring into the original what was assigned to the copy, our own name excepted."""
        now, target = vars(self.copy), vars(self.original)
        for attribute, value in now.items():
            is_ours = attribute == _FIELD and value == name
            if not is_ours and value is not self.born.get(attribute, self):
                target[attribute] = value
        for attribute in self.born.keys() - now.keys():
            target.pop(attribute, None)


def _copied(config: PretrainedConfig, copies: dict[int, _Copy]) -> _Copy:
    """The copy of a config, made once, and with it those of its sub-configs."""
    if id(config) not in copies:
        copies[id(config)] = _Copy(config)
        for value in vars(config).values():
            if isinstance(value, PretrainedConfig):
                _copied(value, copies)
    return copies[id(config)]


def _configs_without_interface(model: nn.Module) -> set[int]:
    """Ids of configs that only models outside the interface hold, a vision tower's for example."""
    able: set[int] = set()
    unable: set[int] = set()
    for inner in pretrained_models(model):
        has_sites = any(is_attention_site(module) for module in inner.modules())
        (able if has_sites else unable).add(id(inner.config))
    return unable - able
