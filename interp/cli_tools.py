"""The commands beside the case studies: ``interp bench``, ``doctor`` and ``cache``."""

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from interp.cli_options import (
    EXIT_FAILED,
    Device,
    Dtype,
    Json,
    Quiet,
    errors_on_one_line,
    json_text,
    print_json,
    print_lines,
    refuse,
)
from interp.errors import UsageError, UserError, unknown


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Without it: list them.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads to compute with.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    out: Annotated[
        Path | None, typer.Option(help="Write the result here as JSON.", show_default=False)
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure speed or memory against a plain implementation."""
    with errors_on_one_line():
        known = _benchmarks()
        if name is None:
            return print_json(known) if as_json else print_lines(known)
        if name not in known:
            raise UsageError(unknown("benchmark", name, known))
        measure = import_module(f"interp.benchmarks.{name}").run
        defaults = inspect.signature(measure).parameters
        asked = {
            "threads": threads,
            "rounds": rounds,
            "device": device or defaults["device"].default,
            "dtype": dtype or defaults["dtype"].default,
        }
        try:
            result = measure(**asked)
        except ValueError as error:
            # by convention a refusal begins with the argument that it refuses
            if str(error).split(":")[0].strip("-") not in asked:
                raise
            raise UsageError(f"benchmark {name}: {error}") from error
        found = asdict(result)
        if out is not None:
            from interp.files import write_atomically

            try:
                write_atomically(out, json_text(found) + "\n")
            except OSError as error:
                raise UserError(f"--out: cannot write {out}: {error.strerror}") from error
        if as_json:
            return print_json(found)
        from interp.terminal import plain_table, print_table, say

        rows = [row if isinstance(row, Sequence) else list(row.values()) for row in found["rows"]]
        print_table(plain_table(found["columns"], rows))
        if not quiet:
            notes = found["notes"]
            for note in [notes] if isinstance(notes, str) else notes:
                say(note)
            say(", ".join(f"{k} {v}" for k, v in found["environment"].items()), style="dim")


def doctor(
    device: Device = None, dtype: Dtype = None, as_json: Json = False, quiet: Quiet = False
) -> None:
    """Tell versions, devices, compiler and caches, and what would be slow here, and why."""
    with errors_on_one_line():
        from interp.doctor import DEVICES, DTYPES, examine

        refuse("--device", device, list(DEVICES), "the doctor")
        refuse("--dtype", dtype, list(DTYPES), "the doctor")
        findings = examine(device=device, dtype=dtype)
        if as_json:
            print_json([asdict(finding) for finding in findings])
        else:
            from interp.terminal import plain_table, print_table

            shown = [found for found in findings if not quiet or found.state != "ok"]
            rows = [(f.state, f.area, f.what, f.said) for f in shown]
            if rows:
                print_table(plain_table(["", "area", "what", "found"], rows))
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def cache(
    clear: Annotated[
        str | None,
        typer.Option("--clear", metavar="NAME", help="Empty one of them.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before clearing.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell where the caches are and what they take; empty one with --clear NAME."""
    with errors_on_one_line():
        from interp import caches
        from interp.terminal import plain_table, print_table, size_text

        refuse("--device", device, ["cpu"], "looking after caches")
        refuse("--dtype", dtype, [], "looking after caches")
        known = {found.name: found for found in caches.caches()}
        if clear is None:
            sizes = {name: caches.size(found.folder) for name, found in known.items()}
            if as_json:
                return print_json(
                    [
                        {**asdict(found), "folder": str(found.folder), "bytes": sizes[name]}
                        for name, found in known.items()
                    ]
                )
            rows = [
                (name, size_text(sizes[name]), str(found.folder), found.holds)
                for name, found in known.items()
            ]
            return print_table(plain_table(["cache", "size", "folder", "holds"], rows))
        if clear not in known:
            raise UsageError(unknown("cache", clear, known))
        chosen = known[clear]
        if not chosen.can_be_cleared:
            raise UsageError(
                f"--clear: {clear!r} holds {chosen.holds}, of other programs too; delete "
                f"{chosen.folder} yourself if you mean to"
            )
        held = size_text(caches.size(chosen.folder))
        if not yes and not typer.confirm(f"Delete {held} in {chosen.folder}?", err=True):
            raise typer.Exit(EXIT_FAILED)
        freed = caches.clear(chosen)
        if as_json:
            return print_json({"cleared": clear, "bytes": freed})
        if not quiet:
            print(f"freed {size_text(freed)}")


def _benchmarks() -> list[str]:
    folder = Path(__file__).with_name("benchmarks")
    return sorted(
        path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text("utf-8")
    )
