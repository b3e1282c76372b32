"""TransformerLens' ActivationCache, exact for models whose norms and residuals are placed freely.

TransformerLens knows one kind of norm per model, folded weights, and a residual stream that is
only ever added to. Here each place has its own norm or none, gains are not folded, and a layer may
replace the stream: decompositions take this into account, or refuse.
"""

from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice

from interp.models.normalization import Norm

# What TransformerLens slices an axis with: an index, (start, stop, step), indices, or its Slice.
SliceLike: TypeAlias = (
    int | tuple[int, ...] | slice | list[int] | Tensor | np.ndarray | Slice | None
)


class TransformerCache(ActivationCache):
    """Activations of one forward pass by name, with TransformerLens' methods."""

    def apply_slice_to_batch_dim(self, batch_slice: SliceLike) -> "TransformerCache":
        """As ActivationCache's."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return TransformerCache(sliced.cache_dict, self.model, sliced.has_batch_dim)

    def apply_ln_to_stack(
        self,
        residual_stack: Float[Tensor, "component *batch pos d_model"],
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: SliceLike = None,
        batch_slice: SliceLike = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Float[Tensor, "component *batch pos d_model"]:
        """What each component contributes to the input of a layer, through the norm in front of it.

        Linear, with the cached scale: the component, centred for a LayerNorm, times gain / scale.
        The norm's bias belongs to no component: the contributions of all components and it add up
        to ``hook_normalized``. Without a norm at that place the stack comes back as it is.

        layer: whose attention (or, with ``mlp_input``, MLP) reads; None, -1 or n_layers for the
        unembedding. recompute_ln: normalize each component by its own scale, bias included, as the
        logit lens does. pos_slice is taken to be applied to the stack already.
        """
        batches, positions = _as_slice(batch_slice), _as_slice(pos_slice)
        if has_batch_dim:
            residual_stack = batches.apply(residual_stack, dim=1)
        norm, name = self._norm_before(layer, mlp_input)
        if norm is None:
            return residual_stack
        if recompute_ln:
            return torch.stack([norm(component) for component in residual_stack])
        if f"{name}.hook_scale" not in self.cache_dict:
            raise ValueError(
                f"{name}.hook_scale is not in this cache: cache it too, or use apply_ln=False"
            )
        scale = positions.apply(self.cache_dict[f"{name}.hook_scale"], dim=-2)
        if self.has_batch_dim:
            scale = batches.apply(scale)
        if norm.kind == "LN":
            residual_stack = residual_stack - residual_stack.mean(-1, keepdim=True)
        return residual_stack / scale * norm.w

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: SliceLike = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """As ActivationCache's; ValueError where a layer replaces the stream instead of adding."""
        self._require_residuals("decompose_resid")
        return super().decompose_resid(
            layer, mlp_input, mode, apply_ln, pos_slice, incl_embeds, return_labels
        )

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: SliceLike = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Any:
        """As ActivationCache's; ValueError where a layer replaces the stream instead of adding."""
        self._require_residuals("get_full_resid_decomposition")
        return super().get_full_resid_decomposition(
            layer,
            mlp_input,
            expand_neurons,
            apply_ln,
            pos_slice,
            return_labels,
            project_output_onto,
        )

    def _stack_neuron_results_apply_ln_projected(
        self,
        layer: int,
        pos_slice: Slice,
        neuron_slice: Slice,
        project_2d: Float[Tensor, "d_model output"],
        mlp_input: bool = False,
    ) -> Tensor:
        # TransformerLens' shortcut that never holds [.., d_mlp, d_model], with this place's norm:
        # (norm of a_n W_out_n) . p = a_n / scale * (W_out_n . wp - mean(W_out_n) sum(wp))
        norm, name = self._norm_before(layer, mlp_input)
        if norm is None:
            raise ValueError(f"apply_ln=True: there is no {name} to apply; use apply_ln=False")
        scale = pos_slice.apply(self[f"{name}.hook_scale"], dim=-2)
        gained = norm.w[:, None] * project_2d
        stacks = [scale.new_zeros(*scale.shape[:-1], 0, gained.shape[-1])]
        for index in range(layer):
            W_out = neuron_slice.apply(self.model.blocks[index].mlp.W_out, dim=0)
            effect = W_out @ gained
            if norm.kind == "LN":
                effect = effect - W_out.mean(-1, keepdim=True) * gained.sum(0)
            post = neuron_slice.apply(pos_slice.apply(self[("post", index)], dim=-2), dim=-1)
            stacks.append((post / scale)[..., None] * effect)
        return torch.cat(stacks, dim=-2).movedim(-2, 0)

    def _norm_before(self, layer: int | None, mlp_input: bool) -> tuple[Norm | None, str]:
        """The norm that an input passes through, and its name; None where there is none."""
        n_layers = self.model.cfg.n_layers
        if layer is None or layer in (-1, n_layers):
            return getattr(self.model, "ln_final", None), "ln_final"
        part = "ln2" if mlp_input else "ln1"
        return getattr(self.model.blocks[layer], part, None), f"blocks.{layer}.{part}"

    def _require_residuals(self, method: str) -> None:
        config = self.model.cfg
        if config.attention_residual and (config.mlp_residual or config.attn_only):
            return
        raise ValueError(
            f"{method}: in this model a layer replaces the residual stream "
            f"(attention_residual={config.attention_residual}, mlp_residual={config.mlp_residual}),"
            " so the stream is no sum of what components wrote; read hook_attn_out, hook_mlp_out "
            "or stack_head_results instead"
        )


def _as_slice(slice_like: SliceLike) -> Slice:
    # an integer drops the axis, as everywhere in ActivationCache (but not in run_with_cache)
    return slice_like if isinstance(slice_like, Slice) else Slice(slice_like)
