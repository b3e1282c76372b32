"""The zoo by name: models whose answers are known, over the published Dyck language of 2 types and
depth 4.

``dyck-uniform`` and ``dyck-random`` are built by hand and recognise up to 128 brackets; ``E1`` to
``E6`` are the published architectures with their first random weights, to be trained by
`interp.models.training`. For other languages, seeds and lengths call the builders themselves.
"""

from collections.abc import Callable

import torch

from interp.models.config import TransformerConfig
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import PRESETS, PUBLISHED_LANGUAGE, dyck_preset
from interp.models.dyck_recognisers import random_pair_tied_recogniser, uniform_recogniser
from interp.models.transformer import Transformer

_LENGTH = 128


def build_zoo_model(name: str, *, dtype: torch.dtype) -> tuple[Transformer, DyckLanguage]:
    """A model of the zoo in ``dtype``, and its language.

    Raises KeyError for an unknown name; ValueError when ``dtype`` is too coarse for a recogniser.
    """
    return _BUILDERS[name](dtype), PUBLISHED_LANGUAGE


def zoo_names() -> list[str]:
    """Every name that `build_zoo_model` knows."""
    return list(_BUILDERS)


def _untrained(name: str) -> Callable[[torch.dtype], Transformer]:
    def build(dtype: torch.dtype) -> Transformer:
        config, _ = dyck_preset(name)
        assert isinstance(config, TransformerConfig)
        return Transformer(config).to(dtype=dtype)

    return build


_BUILDERS: dict[str, Callable[[torch.dtype], Transformer]] = {
    "dyck-uniform": lambda dtype: uniform_recogniser(
        PUBLISHED_LANGUAGE, length=_LENGTH, dtype=dtype
    ),
    "dyck-random": lambda dtype: random_pair_tied_recogniser(
        PUBLISHED_LANGUAGE, length=_LENGTH, seed=0, dtype=dtype
    ),
    **{name: _untrained(name) for name in PRESETS},
}
