"""Record the activations of named points of a model, example by example, onto the disk.

Examples are run in batches, one shard at a time, so that memory holds one shard and one batch. A
shard is written whole and then entered in the index: a recording that is killed goes on after the
last whole shard, with the same batches as if nothing had happened.
"""

import fnmatch
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from interp.activation_store import INDEX, ActivationStore, Index, Recording, Shard, read_index
from interp.files import PartialFile, remove_leftovers, write_atomically
from interp.observe_sites import model_name

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AT = ("all", "last", "mean")


def record_activations(
    model: nn.Module,
    examples: Sequence[Sequence[int] | Tensor],
    *,
    points: Sequence[str],
    folder: str | Path,
    positions: str | Sequence[int] = "all",
    dtype: str = "float32",
    shuffle: bool = False,
    seed: int = 0,
    batch_size: int = 16,
    shard_examples: int = 1024,
) -> ActivationStore:
    """Run a model over examples of tokens and keep the outputs of its modules.

    points
        Names of modules as in ``model.named_modules()``, ``*`` standing for anything:
        ``"model.layers.*"`` is every block's residual stream, ``"blocks.*.hook_resid_post"`` the
        same in our zoo (hook points are modules too). ``":in"`` after a name is the module's input.
        Each must give [batch, pos, ...].
    positions
        "all", "last", "mean" (over an example's tokens), or a few positions, negative ones counted
        from the example's end.
    shuffle, seed
        Lay the examples down in an order drawn from the seed, which is recorded.
    folder
        A new or empty one, or one where the same recording was begun: then it goes on.

    Returns the open store. Padding goes to the right and its positions are not kept. The model's
    hooks and mode are left as they were, and it runs without gradients.

    Raises ValueError for unknown points, empty examples, or a folder that holds another recording.
    """
    folder = Path(folder)
    names = _find_points(model, points)
    lists = [_as_ids(example, number) for number, example in enumerate(examples)]
    if not lists:
        raise ValueError("examples: is empty, expected at least one list of tokens")
    at = _check_positions(positions, lists)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(_DTYPES)}")
    for name, value in (("batch_size", batch_size), ("shard_examples", shard_examples)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    recording = Recording(
        points=tuple(names),
        positions=at,
        n_examples=len(lists),
        seed=seed if shuffle else None,
        dtype=dtype,
        batch_size=batch_size,
        shard_examples=shard_examples,
        inputs=hashlib.sha256(json.dumps(lists).encode()).hexdigest(),
        model=fingerprint(model),
        model_name=model_name(model),
    )
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        index = _begin_or_resume(folder, recording)
        order = draw_order(len(lists), recording.seed)
        while index.n_done < len(lists):
            first = index.n_done
            last = min(first + shard_examples, len(lists))
            tensors = _record_shard(model, lists, order[first:last], recording)
            _write_shard(folder, index, tensors, first, last)
    return ActivationStore(folder)


def draw_order(n_examples: int, seed: int | None) -> list[int]:
    """The order in which examples lie on disk: a permutation drawn from the seed, or as given."""
    if seed is None:
        return list(range(n_examples))
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n_examples, generator=generator).tolist()


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter's name, shape, type and numbers."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        bits = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


def _find_points(model: nn.Module, points: Sequence[str]) -> list[str]:
    if isinstance(points, str) or not points:
        raise TypeError(
            f"points: got {points!r}, expected a list of names such as 'model.layers.*'"
        )
    known = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for point in points:
        name, separator, side = point.partition(":")
        if separator and side != "in":
            raise ValueError(f"points: {point!r} ends in {side!r}, expected ':in' or nothing")
        # `*` may not run across a dot, so that "model.layers.*" means blocks and not their parts
        matches = [k for k in known if _matches(k, name)]
        if not matches:
            raise ValueError(
                f"points: {model_name(model)} has no module {name!r}; its modules are named like "
                f"{', '.join(known[:4])}, ... (model.named_modules())"
            )
        found += [match + separator + side for match in matches]
    return list(dict.fromkeys(found))


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _as_ids(example: Sequence[int] | Tensor, number: int) -> list[int]:
    ids = example.tolist() if isinstance(example, Tensor) else list(example)
    if not ids or not all(isinstance(token, int) for token in ids):
        raise ValueError(f"examples: number {number} is {ids!r}, expected one or more token ids")
    return ids


def _check_positions(
    positions: str | Sequence[int], lists: Sequence[Sequence[int]]
) -> str | tuple[int, ...]:
    if isinstance(positions, str):
        if positions not in _AT:
            raise ValueError(
                f"positions: got {positions!r}, expected {', '.join(_AT)}, or a list of positions"
            )
        return positions
    shortest = min(map(len, lists))
    for position in positions:
        if not -shortest <= position < shortest:
            raise ValueError(
                f"positions: name {position}, but the shortest example has {shortest} tokens"
            )
    return tuple(positions)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a folder; those that died before do not count."""
    remove_leftovers(folder)
    try:
        lock = PartialFile(folder / "recording.partial")
    except BlockingIOError as error:
        raise ValueError(f"folder: another process is recording into {folder} just now") from error
    with lock:
        yield


def _begin_or_resume(folder: Path, recording: Recording) -> Index:
    if not (folder / INDEX).is_file():
        strangers = [path.name for path in folder.iterdir() if path.name != "recording.partial"]
        if any(not name.startswith("shard-") for name in strangers):
            raise ValueError(
                f"folder: {folder} holds other files ({sorted(strangers)[0]}, ...); choose a new "
                "or an empty one"
            )
        index = Index(recording)
        index.write(folder)
        return index
    index = read_index(folder)
    for name, value in vars(recording).items():
        before = getattr(index.recording, name)
        if before != value:
            raise ValueError(
                f"folder: {folder} holds another recording, whose {name} is {_short(before)} and "
                f"not {_short(value)}; choose another folder"
            )
    return index


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _record_shard(
    model: nn.Module, lists: Sequence[list[int]], chosen: Sequence[int], recording: Recording
) -> dict[str, Tensor]:
    """Rows of the chosen examples, in this order."""
    kept: dict[str, list[Tensor]] = {name: [] for name in recording.points}
    rows: list[tuple[int, int]] = []
    device = next(model.parameters()).device
    for begin in range(0, len(chosen), recording.batch_size):
        batch = chosen[begin : begin + recording.batch_size]
        tokens, mask = _pad([lists[example] for example in batch], device)
        with torch.no_grad(), _captured(model, recording.points) as outputs:
            model(tokens, attention_mask=mask)
        for i, example in enumerate(batch):
            length = len(lists[example])
            taken = _positions(recording.positions, length)
            rows += [(example, position) for position in taken]
            for name in recording.points:
                kept[name].append(
                    _take(name, outputs, i, length, taken).to(_DTYPES[recording.dtype])
                )
    tensors = {name: torch.cat(parts).contiguous() for name, parts in kept.items()}
    tensors["example"], tensors["position"] = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    return tensors


def _pad(texts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, texts))
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return tokens.to(device), mask.to(device)


@contextmanager
def _captured(model: nn.Module, points: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs (or inputs) of modules while the block runs."""
    outputs: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for point in points:
            name, _, side = point.partition(":")
            module = model.get_submodule(name)

            def keep(
                module: nn.Module, args: Any, output: Any, point: str = point, side: str = side
            ) -> None:
                value = args if side == "in" else output
                value = value if isinstance(value, Tensor) else value[0]
                if point in outputs:
                    raise ValueError(f"points: {point!r} ran twice in one forward pass")
                outputs[point] = value.detach()

            stack.callback(module.register_forward_hook(keep).remove)
        yield outputs


def _positions(at: str | tuple[int, ...], length: int) -> list[int]:
    """Positions of the rows that an example of this length gives; -1 stands for its mean."""
    if at == "all":
        return list(range(length))
    if at == "last":
        return [length - 1]
    if at == "mean":
        return [-1]
    return [int(position) % length for position in at]


def _take(
    point: str, outputs: dict[str, Tensor], i: int, length: int, taken: Sequence[int]
) -> Tensor:
    if point not in outputs:
        raise ValueError(f"points: {point!r} did not run in the model's forward pass")
    output = outputs[point]
    if output.ndim < 3 or output.shape[1] < length:
        raise ValueError(
            f"points: {point!r} gives {tuple(output.shape)}, expected [batch, pos, ...]"
        )
    real = output[i, :length].cpu()
    return real.mean(0, keepdim=True) if list(taken) == [-1] else real[list(taken)]


def _write_shard(
    folder: Path, index: Index, tensors: dict[str, Tensor], first: int, last: int
) -> None:
    for name in index.recording.points:
        shape = list(tensors[name].shape[1:])
        if index.shapes.setdefault(name, shape) != shape:
            raise ValueError(
                f"points: {name!r} has rows of shape {shape} and had {index.shapes[name]} before; "
                "its shape may not depend on the text's length"
            )
    content = save(tensors)
    file = f"shard-{len(index.shards):05d}.safetensors"
    write_atomically(folder / file, content)
    index.shards.append(Shard(file, first, last, len(tensors["example"]), len(content)))
    index.write(folder)
