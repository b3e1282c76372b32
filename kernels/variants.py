"""What may stand in the place of softmax: each variant is a small frozen description.

Letters: s scores after scale, softcap, ALiBi, bias and temperature; n the number of keys that a
query may attend to; masked keys take no part in any sum.

===================  ==========================================================  ==============
name                 weight of a key                                             rows sum to
===================  ==========================================================  ==============
softmax              e^s / sum e^s                                               1
softmax1             e^s / (1 + sum e^s): a sink logit of 0                      < 1
key_value_bias       softmax with one learned key (and value) more               < 1
softpick             relu(e^s - 1) / (sum |e^s - 1| + eps)                       <= 1
clipped              clip((upper - lower) softmax(s) + lower, 0, 1)              any
relu                 relu(s) / n                                                 any
sigmoid              sigmoid(s - log n)                                          any
sigmoid_unshifted    sigmoid(s)                                                  any
===================  ==========================================================  ==============

Sources: softmax1 (Miller 2023, "Attention is off by one"); key and value biases (Gu et al., ICLR
2025, section 6; Sun et al., COLM 2024); softpick (Zuhri et al. 2025); clipped softmax (Bondarenko
et al., NeurIPS 2023); ReLU over length (Wortsman et al. 2023); sigmoid (Ramapuram et al., ICLR
2025).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Softmax:
    """The usual one; it alone goes together with learned sinks."""

    name: ClassVar[str] = "softmax"


@dataclass(frozen=True)
class Softmax1:
    """Softmax with an extra zero key and zero value, which is a sink logit of 0."""

    name: ClassVar[str] = "softmax1"


@dataclass(frozen=True, eq=False)
class KeyValueBias:
    """One more key per head, open to every query whatever the masks say.

    ``key`` [n_heads, d_head] and ``value`` [n_heads, d_value] are differentiable; without a value
    the slot only takes attention away. The slot's score is scaled and soft-capped as the others
    are, and gets no ALiBi and no bias. Its weight is the statistic ``sink_mass``; masses, received
    and pattern leave it out.
    """

    key: Tensor
    value: Tensor | None = None
    name: ClassVar[str] = "key_value_bias"


@dataclass(frozen=True)
class Softpick:
    """Rectified softmax: keys whose score is below 0 get nothing, and rows may be empty."""

    eps: float = 1e-6
    name: ClassVar[str] = "softpick"


@dataclass(frozen=True)
class ClippedSoftmax:
    """Softmax stretched to ``[lower, upper]`` and clipped to ``[0, 1]``: zeros can be exact."""

    lower: float = -0.03
    upper: float = 1.0
    name: ClassVar[str] = "clipped"


@dataclass(frozen=True)
class ReluOverLength:
    """ReLU of the scores over ``length``; None: over the number of keys the query may attend to."""

    length: int | None = None
    name: ClassVar[str] = "relu"


@dataclass(frozen=True)
class Sigmoid:
    """Sigmoid of the scores, shifted by ``-log(length)`` unless ``is_shifted`` is False.

    ``length`` None means the number of keys that the query may attend to.
    """

    length: int | None = None
    is_shifted: bool = True
    name: ClassVar[str] = "sigmoid"


Variant = Softmax | Softmax1 | KeyValueBias | Softpick | ClippedSoftmax | ReluOverLength | Sigmoid

VARIANTS: dict[str, Variant] = {
    "softmax": Softmax(),
    "softmax1": Softmax1(),
    "softpick": Softpick(),
    "clipped": ClippedSoftmax(),
    "relu": ReluOverLength(),
    "sigmoid": Sigmoid(),
    "sigmoid_unshifted": Sigmoid(is_shifted=False),
}

# These are softmax over one more column, so every statistic keeps its softmax formula.
SOFTMAX_NAMES = frozenset({"softmax", "softmax1", "key_value_bias"})


def resolve_variant(variant: object) -> Variant:
    """The description behind a name, or the description itself after a look at its numbers."""
    if isinstance(variant, str):
        if variant == KeyValueBias.name:
            raise ValueError(
                "variant='key_value_bias' has parameters of its own: "
                "pass variant=KeyValueBias(key=..., value=...)"
            )
        if variant not in VARIANTS:
            known = ", ".join(sorted(VARIANTS))
            raise ValueError(f"variant: unknown name {variant!r}; known are {known}")
        return VARIANTS[variant]
    if not isinstance(variant, Variant):
        raise TypeError(
            f"variant: got {type(variant).__name__}, expected a name such as 'softmax' or one of "
            "the descriptions in interp.kernels.variants"
        )
    if isinstance(variant, Softpick) and not variant.eps > 0:
        raise ValueError(f"variant: Softpick.eps is {variant.eps}, expected a number above 0")
    if isinstance(variant, ClippedSoftmax) and not variant.lower <= 0 < variant.upper:
        raise ValueError(
            f"variant: ClippedSoftmax has lower={variant.lower}, upper={variant.upper}; "
            "expected lower <= 0 < upper"
        )
    if isinstance(variant, ReluOverLength | Sigmoid):
        length = variant.length
        if length is not None and (not isinstance(length, int) or length < 1):
            raise ValueError(f"variant: length is {length!r}, expected an int of at least 1")
    return variant
