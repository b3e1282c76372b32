"""Massive activations: single numbers in the residual stream that dwarf all others.

Hidden states are ``[batch, layer, pos, d_model]``, torch tensors or numpy arrays, of texts without
padding. Every measure is per text and layer: medians and maxima are over that text's tokens.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

Array = Tensor | np.ndarray


def massive_activations(
    hidden: Float[Array, "batch layer pos d_model"],
    *,
    min_size: float = 100.0,
    min_ratio: float = 1000.0,
) -> pd.DataFrame:
    """Every entry with |x| > min_size and |x| >= min_ratio times the layer's median |x|.

    Columns: ``sample layer position dimension value ratio``, largest first within a layer. Small
    models reach neither bound while doing the same thing: look at `activation_outliers` too.
    Source: Sun et al., COLM 2024 (arXiv 2402.17762), the definition of section 2.
    """
    sizes = torch.as_tensor(hidden).detach().abs()
    median = _median(sizes)[:, :, None, None]
    is_massive = (sizes > min_size) & (sizes >= min_ratio * median)
    places = is_massive.nonzero()
    found = pd.DataFrame(places.cpu().numpy(), columns=["sample", "layer", "position", "dimension"])
    found["value"] = torch.as_tensor(hidden).detach()[is_massive].double().cpu().numpy()
    found["ratio"] = (sizes / median)[is_massive].double().cpu().numpy()
    order = ["sample", "layer", "ratio"]
    return found.sort_values(order, ascending=[True, True, False], ignore_index=True)


def activation_outliers(hidden: Float[Array, "batch layer pos d_model"]) -> pd.DataFrame:
    """The largest entry of each text and layer, and how far it stands out.

    Columns: ``sample layer max_size median ratio kurtosis position dimension``. ``ratio`` is the
    largest |x| over the median |x|; ``kurtosis`` the fourth standardised moment of the layer's
    entries (3 for a Gaussian); place is that of the largest.
    """
    states = torch.as_tensor(hidden).detach()
    n_samples, n_layers, _, d_model = states.shape
    flat = states.flatten(2)
    top = flat.abs().max(-1)
    median = _median(states.abs())
    centred = flat.double() - flat.double().mean(-1, keepdim=True)
    variance = centred.square().mean(-1)
    columns = {
        "max_size": top.values,
        "median": median,
        "ratio": top.values / median,
        "kurtosis": centred.pow(4).mean(-1) / variance.square(),
        "position": top.indices // d_model,
        "dimension": top.indices % d_model,
    }
    table = pd.DataFrame({name: v.flatten().cpu().numpy() for name, v in columns.items()})
    sample, layer = np.divmod(np.arange(n_samples * n_layers), n_layers)
    table.insert(0, "sample", sample)
    table.insert(1, "layer", layer)
    return table


def mean_max_activation(hidden: Float[Array, "batch layer pos d_model"]) -> Float[Tensor, "batch"]:
    """M-Act: the largest |h| of each layer, averaged over the layers.

    Source: Qiu et al., NeurIPS 2025 (arXiv 2505.06708).
    """
    return torch.as_tensor(hidden).abs().flatten(2).amax(-1).mean(-1)


class Wave(NamedTuple):
    """A run of layers, both ends included, in which the first token's norm towers."""

    first_layer: int
    last_layer: int


def norm_waves(norms: Float[Array, "layer pos"], *, min_ratio: float = 4.0) -> list[Wave]:
    """Where the first token's norm rises and falls: each run of layers of at least ``min_ratio``.

    norms: |h| by layer and position, of one text or averaged over texts.
    min_ratio: of the first token's norm to the median norm of the others.

    A model can have several waves (SmolLM2-135M has two), written and erased by different layers:
    look for secondary sinks in each by itself.
    """
    norms = torch.as_tensor(norms)
    if norms.shape[1] < 2:
        raise ValueError("norms has one position only: there is no other to compare it with")
    is_high = (norms[:, 0] >= min_ratio * norms[:, 1:].median(-1).values).tolist()
    waves: list[Wave] = []
    for layer, high in enumerate(is_high):
        if not high:
            continue
        if waves and waves[-1].last_layer == layer - 1:
            waves[-1] = Wave(waves[-1].first_layer, layer)
        else:
            waves.append(Wave(layer, layer))
    return waves


def cosine_to_first(
    hidden: Float[Array, "batch layer pos d_model"],
) -> Float[Tensor, "batch layer pos"]:
    """Cosine of every token's state with the first token's in the same layer, in [-1, 1]."""
    states = torch.as_tensor(hidden).detach()
    return torch.nn.functional.cosine_similarity(states, states[:, :, :1], dim=-1)


def secondary_sinks(
    hidden: Float[Array, "batch layer pos d_model"],
    wave: Wave,
    *,
    min_cosine: float = 0.9,
) -> pd.DataFrame:
    """Later tokens whose state points along the first token's, with their lifetime in layers.

    wave: the layers to look in, between the rise and the fall of the first token's norm; elsewhere
        the first token is a token like any and a cosine means nothing.

    Columns: ``sample position first_layer lifetime``: one row per run of consecutive layers with
    |cos(h_t, h_0)| > min_cosine.
    Source: Wong et al., arXiv 2512.22213.
    """
    return aligned_runs(cosine_to_first(hidden), wave, min_cosine=min_cosine)


def aligned_runs(
    cosines: Float[Array, "batch layer pos"], wave: Wave, *, min_cosine: float = 0.9
) -> pd.DataFrame:
    """`secondary_sinks` from the cosines to the first token, which take less room to keep."""
    first, last = wave
    cosines = torch.as_tensor(cosines)
    if not 0 <= first <= last < cosines.shape[1]:
        raise ValueError(f"{wave} is not within the {cosines.shape[1]} layers there are")
    is_aligned = (cosines[:, first : last + 1, 1:].abs() > min_cosine).transpose(1, 2)
    edge = torch.zeros_like(is_aligned[..., :1])
    change = torch.diff(torch.cat([edge, is_aligned, edge], -1).to(torch.int8), dim=-1)
    # Starts and ends of runs are met in the same order: row by row, and by layer within a row.
    starts, ends = (change == 1).nonzero().cpu(), (change == -1).nonzero().cpu()
    return pd.DataFrame(
        {
            "sample": starts[:, 0].numpy(),
            "position": starts[:, 1].numpy() + 1,
            "first_layer": starts[:, 2].numpy() + first,
            "lifetime": (ends[:, 2] - starts[:, 2]).numpy(),
        }
    )


def _median(sizes: Float[Tensor, "batch layer pos d_model"]) -> Float[Tensor, "batch layer"]:
    """The middle one, or the mean of the middle two, as numpy's; torch takes the lower."""
    ordered = sizes.flatten(2).sort(-1).values
    n = ordered.shape[-1]
    return (ordered[..., (n - 1) // 2] + ordered[..., n // 2]) / 2
