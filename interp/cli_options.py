"""What all commands have in common: options, exit statuses, how errors and JSON are printed."""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from interp.errors import UsageError, UserError

EXIT_FAILED, EXIT_USAGE, EXIT_CLAIM, EXIT_INTERRUPTED = 1, 2, 3, 130

Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or mps.", show_default=False)
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, float64, bfloat16, ...", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what was asked for.")]


@contextlib.contextmanager
def errors_on_one_line() -> Iterator[None]:
    """Tell what a user can put right in one line; let everything else show where it happened."""
    try:
        yield
    except UserError as error:
        from interp.terminal import complain

        complain(str(error))
        code = EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
        raise typer.Exit(code) from error
    except KeyboardInterrupt as interrupt:
        from interp.terminal import complain

        complain(str(interrupt) or "interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def refuse(option: str, asked: str | None, offered: Sequence[str], who: str) -> None:
    """Refuse a value that a command has no use for, rather than swallow it."""
    if asked is not None and asked not in offered:
        can = f"it can use {', '.join(offered)}" if offered else f"it has no use for {option}"
        raise UsageError(f"{option}: {who} cannot use {asked!r}; {can}")


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(json_text(value))


def json_text(value: Any) -> str:
    """Strict JSON; NaN and infinities become null, paths and dates text."""
    return json.dumps(_strict(value), indent=1, ensure_ascii=False, allow_nan=False, default=str)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): _strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def print_lines(lines: Iterable[str]) -> None:
    """Print one thing a line, for scripts."""
    for line in lines:
        print(line)
