"""The E1 and E5 models as bare PyTorch: the same maths without hook points, to be timed beside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.models.dyck_training import DyckTrainingConfig
from interp.models.dyck_vocabulary import PAD
from interp.models.transformer import Transformer


class BareAttention(nn.Module):
    """One causal head over the whole width; ``out`` only where ours has an output projection."""

    def __init__(self, width: int, *, has_output: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width) if has_output else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unsqueeze(1) for f in (self.query, self.key, self.value))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.squeeze(1))


class BareMinimal(nn.Module):
    """E1: head(norm(attention(one-hot of bracket and depth)))."""

    step: Tensor
    first_row: Tensor
    table: Tensor

    def __init__(self, width: int, n_tokens: int, ours: Transformer) -> None:
        super().__init__()
        for name in ("step", "first_row", "table"):
            self.register_buffer(name, getattr(ours.embed, name).clone())
        self.attention = BareAttention(width, has_output=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.first_row[tokens] + self.step[tokens].cumsum(-1)
        return self.head(self.norm(self.attention(F.embedding(rows, self.table))))


class BareBlock(nn.Module):
    """x + attention(x), then that + mlp(norm(that))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = BareAttention(width, has_output=True)
        self.norm = nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.write(F.gelu(self.read(self.norm(x)), approximate="tanh"))


class BareStandard(nn.Module):
    """E5: two blocks over one-hot brackets."""

    table: Tensor

    def __init__(self, width: int, n_tokens: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.eye(n_tokens, width))
        self.blocks = nn.Sequential(BareBlock(width), BareBlock(width))
        self.head = nn.Linear(width, n_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(F.embedding(tokens, self.table)))


@torch.no_grad()
def bare_twin(ours: Transformer) -> BareMinimal | BareStandard:
    """The bare model with the weights of ours, which must be an E1 or an E5."""
    width, n_tokens = ours.cfg.d_model, ours.cfg.d_vocab
    is_minimal = ours.cfg.d_mlp is None
    twin = BareMinimal(width, n_tokens, ours) if is_minimal else BareStandard(width, n_tokens)
    names = {"ln_final.w": "norm.weight", "ln_final.b": "norm.bias", "unembed.W_U": "head.weight"}
    for layer in range(ours.cfg.n_layers):
        block, bare = f"blocks.{layer}.", "" if is_minimal else f"blocks.{layer}."
        for letter, role in (("Q", "query"), ("K", "key"), ("V", "value"), ("O", "out")):
            names[f"{block}attn.W_{letter}"] = f"{bare}attention.{role}.weight"
            names[f"{block}attn.b_{letter}"] = f"{bare}attention.{role}.bias"
        names |= {f"{block}ln2.w": f"{bare}norm.weight", f"{block}ln2.b": f"{bare}norm.bias"}
        for part, role in (("in", "read"), ("out", "write")):
            names[f"{block}mlp.W_{part}"] = f"{bare}{role}.weight"
            names[f"{block}mlp.b_{part}"] = f"{bare}{role}.bias"
    for name, parameter in ours.named_parameters():
        # one head: its axis has length 1; nn.Linear keeps [out, in] where ours is [in, out]
        given = parameter.reshape(parameter.shape[-2:]).t() if parameter.ndim > 1 else parameter
        given = parameter.flatten() if ".b_" in name else given
        twin.get_parameter(names[name]).copy_(given)
    return twin.to(dtype=ours.cfg.dtype, device=ours.cfg.device)


def train_bare(
    model: nn.Module, inputs: Tensor, targets: Tensor, config: DyckTrainingConfig
) -> list[Tensor]:
    """The loop that one writes by hand, in the order of `interp.models.training.train`."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.n_epochs)
    generator = torch.Generator().manual_seed(config.seed)
    losses = []
    for _ in range(config.n_epochs):
        order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
        for rows in order.split(config.batch_size):
            logits = model(inputs[rows])
            loss = F.cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        scheduler.step()
    return losses
