"""One pass over many texts: norms, outliers and massive activations of the residual stream."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.massive_activations import (
    Wave,
    activation_outliers,
    aligned_runs,
    cosine_to_first,
    massive_activations,
    mean_max_activation,
    norm_waves,
)
from interp.residual_stream import block_outputs


@dataclass(frozen=True, eq=False)
class ResidualProfile:
    """What `residual_profile` measured at the output of every block.

    norms: |h| of every token.
    cosines: of every token's state to the first token's.
    mean_max: M-Act of each text.
    massive, outliers: tables of `massive_activations` and `activation_outliers`; ``layer`` is the
        block.
    """

    norms: Float[Tensor, "batch layer pos"]
    cosines: Float[Tensor, "batch layer pos"]
    mean_max: Float[Tensor, " batch"]
    massive: pd.DataFrame
    outliers: pd.DataFrame

    def waves(self, *, min_ratio: float = 4.0) -> list[Wave]:
        """Runs of blocks in which the first token's norm towers, on the mean over texts."""
        return norm_waves(self.norms.mean(0), min_ratio=min_ratio)

    def secondary_sinks(self, wave: Wave, *, min_cosine: float = 0.9) -> pd.DataFrame:
        """Later tokens that point along the first, with their lifetime in blocks of a wave."""
        return aligned_runs(self.cosines, wave, min_cosine=min_cosine)

    def places(self) -> pd.DataFrame:
        """Where massive activations sit: one row per layer, position and dimension.

        Columns: ``layer position dimension share value ratio``: the share of texts that have it,
        and the means over those. Most frequent first within a layer.
        """
        place = ["layer", "position", "dimension"]
        found = self.massive.groupby(place).agg(
            share=("sample", "nunique"), value=("value", "mean"), ratio=("ratio", "mean")
        )
        found["share"] = found["share"] / len(self.mean_max)
        return found.reset_index().sort_values(
            ["layer", "share"], ascending=[True, False], ignore_index=True
        )


def residual_profile(
    model: Any, tokens: Int[Tensor, "batch pos"], *, batch_size: int = 8
) -> ResidualProfile:
    """Measure the residual stream of a transformers or zoo model on texts of one length.

    Memory grows with the batch, not with the number of texts: what is kept per token and block are
    two numbers.
    """
    norms, cosines, mean_max = [], [], []
    massive: list[pd.DataFrame] = []
    outliers: list[pd.DataFrame] = []
    n_seen = 0
    for hidden in block_outputs(model, tokens, batch_size=batch_size):
        norms.append(torch.linalg.vector_norm(hidden, dim=-1).cpu())
        cosines.append(cosine_to_first(hidden).cpu())
        mean_max.append(mean_max_activation(hidden).cpu())
        for table, measure in ((massive, massive_activations), (outliers, activation_outliers)):
            part = measure(hidden)
            part["sample"] += n_seen
            table.append(part)
        n_seen += len(hidden)
    return ResidualProfile(
        torch.cat(norms),
        torch.cat(cosines),
        torch.cat(mean_max),
        pd.concat(massive, ignore_index=True),
        pd.concat(outliers, ignore_index=True),
    )
