"""The residual stream of a transformers or zoo model: read each block's output, edit one, ask who
wrote an entry.

Blocks are counted from 0; block l's output is transformers' ``hidden_states[l + 1]``, but for the
last one, which transformers normalises before it returns it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.models.transformer import Transformer
from interp.observe_sites import find_sites
from interp.token_windows import check_tokens


def residual_blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model, first to last: the modules that each hold one attention.

    Raises ValueError for a model with several stacks of them (an encoder and a decoder).
    """
    if isinstance(model, Transformer):
        return list(model.blocks.children())
    modules = dict(model.named_modules())
    names: dict[str, None] = {}  # in order, each once: a block may hold two attentions
    for site in find_sites(model).values():
        parts = site.name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        if numbers:
            names.setdefault(".".join(parts[: numbers[-1] + 1]))
    lists = {name.rsplit(".", 1)[0] for name in names}
    if len(lists) != 1:
        found = ", ".join(sorted(lists)) or "none"
        raise ValueError(
            f"expected {type(model).__name__} to have one stack of blocks with attention, "
            f"found: {found}"
        )
    holder = modules[lists.pop()]
    return list(holder.children())  # a hybrid's blocks without attention are blocks as well


@torch.no_grad()
def block_outputs(
    model: Any, tokens: Int[Tensor, "batch pos"], *, batch_size: int = 8
) -> Iterator[Float[Tensor, "batch layer pos d_model"]]:
    """The output of every block, in float32 or what is finer, one batch of texts at a time.

    Texts are of one length, without padding. A batch holds
    ``batch_size * n_layers * n_tokens * d_model`` numbers.
    """
    check_tokens(model, tokens)
    for batch in tokens.split(batch_size):
        outputs: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any, into: list[Tensor] = outputs) -> None:
            into.append(_states(output).detach())

        handles = [block.register_forward_hook(keep) for block in residual_blocks(model)]
        try:
            _run(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        stacked = torch.stack(outputs, 1)
        yield stacked.to(torch.promote_types(stacked.dtype, torch.float32))


@contextmanager
def edited_block_output(
    model: Any,
    block: int,
    edit: Callable[[Float[Tensor, "batch d_model"]], Float[Tensor, "batch d_model"]],
    *,
    position: int = 0,
) -> Iterator[None]:
    """While inside, ``edit`` replaces the residual stream behind a block at one position.

    ``edit`` gets a copy of the states there, may change it in place, and returns what shall stand
    in their stead.
    """
    blocks = residual_blocks(model)
    if not 0 <= block < len(blocks):
        raise ValueError(f"block must be 0..{len(blocks) - 1}, got {block}")

    def replace(module: nn.Module, inputs: Any, output: Any) -> Any:
        states = _states(output).clone()
        states[:, position] = edit(states[:, position].clone())
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handle = blocks[block].register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def block_writes(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    block: int,
    *,
    position: int,
    dimension: int,
    batch_size: int = 8,
) -> dict[str, Float[Tensor, " batch"]]:
    """What a block and its parts have at one entry of the residual stream, for each text.

    Keys: ``before`` and ``after`` the block, and the output of each direct child of the block by
    its name (``self_attn``, ``mlp``, the norms, ...). In a block that adds its attention and its
    MLP to the stream, after - before is the sum of the two.
    """
    check_tokens(model, tokens)
    module = residual_blocks(model)[block]
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, states: Tensor) -> None:
        if states.ndim == 3 and dimension < states.shape[-1]:
            seen.setdefault(name, []).append(states[:, position, dimension].detach().cpu())

    def on_block(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        note("before", inputs[0] if inputs else keywords["hidden_states"])
        note("after", _states(output))

    handles = [module.register_forward_hook(on_block, with_kwargs=True)]
    for name, child in module.named_children():

        def on_child(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            note(name, _states(output))

        handles.append(child.register_forward_hook(on_child))
    try:
        for batch in tokens.split(batch_size):
            _run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def _states(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _run(model: Any, batch: Tensor) -> None:
    if isinstance(model, Transformer):
        model(batch.to(next(model.parameters()).device))
    else:
        model(input_ids=batch.to(model.device), use_cache=False)
