"""A model's weights under TransformerLens' names, stacked over layers, and what they imply."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.models.config import TransformerConfig

_WHY_ABSENT = {
    "W_E": "the vector of a Dyck token depends on its depth: see model.embed.table and .row",
    "W_pos": "this config adds no positions to the residual stream",
    "W_in": "this config has no MLP",
    "W_out": "this config has no MLP",
    "b_in": "this config has no MLP",
    "b_out": "this config has no MLP",
    "W_gate": "this config has no gated MLP",
    "b_gate": "this config has no gated MLP",
}


class WeightAccess(nn.Module):
    """Weights by name; where a config drops a projection or a bias, the identity or zeros.

    A weight that has no meaning for a config raises AttributeError and says why.
    """

    cfg: TransformerConfig
    embed: Any
    pos_embed: Any
    blocks: Any
    unembed: Any

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _WHY_ABSENT:
                raise AttributeError(f"no {name}: {_WHY_ABSENT[name]}") from None
            raise

    def _stack(self, part: str, name: str) -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in self.blocks])

    def _stack_key_values(self, name: str) -> Tensor:
        return self._stack("attn", name).repeat_interleave(
            self.cfg.n_heads // self.cfg.kv_heads, dim=1
        )

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """Token embedding."""
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """Position embedding, learned or not."""
        return self.pos_embed.W_pos

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """Unembedding; the transposed W_E where they are tied."""
        return self.embed.W_E.t() if self.cfg.tie_embeddings else self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        """Bias of the logits."""
        return self.unembed.b_U

    @property
    def W_Q(self) -> Float[Tensor, "layer head_index d_model d_head"]:
        """Query weights."""
        return self._stack("attn", "W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer head_index d_model d_head"]:
        """Key weights, repeated for each query head of a group; the parameters are by layer."""
        return self._stack_key_values("W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer head_index d_model d_head"]:
        """Value weights, repeated for each query head of a group; the parameters are by layer."""
        return self._stack_key_values("W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head_index d_head d_model"]:
        """Output weights; the identity in a config without output projection."""
        return self._stack("attn", "W_O")

    @property
    def b_Q(self) -> Float[Tensor, "layer head_index d_head"]:
        """Query biases."""
        return self._stack("attn", "b_Q")

    @property
    def b_K(self) -> Float[Tensor, "layer head_index d_head"]:
        """Key biases, repeated for each query head of a group."""
        return self._stack_key_values("b_K")

    @property
    def b_V(self) -> Float[Tensor, "layer head_index d_head"]:
        """Value biases, repeated for each query head of a group."""
        return self._stack_key_values("b_V")

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of attention."""
        return self._stack("attn", "b_O")

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """Input weights of the MLPs."""
        return self._stack("mlp", "W_in")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """Gate weights of gated MLPs: what the activation function reads."""
        return self._stack("mlp", "W_gate")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        """Output weights of the MLPs."""
        return self._stack("mlp", "W_out")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        """Input biases of the MLPs."""
        return self._stack("mlp", "b_in")

    @property
    def b_gate(self) -> Float[Tensor, "layer d_mlp"]:
        """Gate biases of gated MLPs."""
        return self._stack("mlp", "b_gate")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        """Output biases of the MLPs."""
        return self._stack("mlp", "b_out")

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d_model"]:
        """Sum of the output biases that have reached the residual stream before ``layer``.

        mlp_input: count that layer's b_O too. Raises ValueError outside 0..n_layers.
        """
        n_layers = self.cfg.n_layers
        if not 0 <= layer <= n_layers - int(mlp_input):
            raise ValueError(
                f"layer={layer}: expected 0..{n_layers - int(mlp_input)} with {mlp_input=}"
            )
        total = torch.zeros(self.cfg.d_model, dtype=self.cfg.dtype, device=self.cfg.device)
        for index in range(layer + int(mlp_input)):
            total = total + self.blocks[index].attn.b_O
            if include_mlp_biases and index < layer and not self.cfg.attn_only:
                total = total + self.blocks[index].mlp.b_out
        return total
