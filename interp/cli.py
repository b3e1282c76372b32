"""The command line: ``interp list``, ``show``, ``run``, ``report``, ``bench``, ``doctor``,
``cache``, ``fetch``, ``observe``.

A thin skin: each command calls ``interp.workflows`` (or the module it is named after) and prints.
What a user can put right is told in one line, with exit status 2 if it was asked for wrongly and 1
if it went wrong; ``--strict`` ends with 3 if a claim failed, Ctrl-C with 130. Anything else is our
fault and shows its traceback.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interp import __version__, cli_models, cli_tools
from interp.cli_options import (
    EXIT_CLAIM,
    EXIT_FAILED,
    Device,
    Dtype,
    Json,
    Quiet,
    errors_on_one_line,
    print_json,
    print_lines,
    refuse,
)

if TYPE_CHECKING:
    from interp.workflows import RunResult

app = typer.Typer(
    name="interp",
    help="Case studies of mechanistic interpretability as claims that are held against numbers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="A name, or a path: ./my_study")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        print(f"interp {__version__}")
        raise typer.Exit


@app.command("list")
def list_command(
    device: Device = None, dtype: Dtype = None, as_json: Json = False, quiet: Quiet = False
) -> None:
    """List the case studies; with --device or --dtype those that offer it."""
    with errors_on_one_line():
        from interp.case_studies.catalogue import describe_studies

        studies = [
            said
            for said in describe_studies()
            if (device is None or device in said["devices"])
            and (dtype is None or dtype in said["dtypes"])
        ]
        if as_json:
            return print_json(studies)
        if quiet:
            return print_lines(said["name"] for said in studies)
        from interp.terminal import plain_table, print_table

        rows = [
            (said["name"], said["title"], said["n_claims"], _minutes(said["minutes"]))
            for said in studies
        ]
        print_table(plain_table(["study", "title", "claims", "time on two cores"], rows))


@app.command()
def show(
    study: StudyName,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a study: its paper, its scales, and each claim with what is expected."""
    with errors_on_one_line():
        from interp.case_studies.catalogue import describe_study

        said = describe_study(study)
        refuse("--device", device, said["devices"], f"study {study}")
        refuse("--dtype", dtype, said["dtypes"], f"study {study}")
        if as_json:
            return print_json(said)
        from interp.terminal import plain_table, print_table, say

        if not quiet:
            say(f"{said['title']}\n", style="bold")
            say(f"{said['paper']}\n{said['summary']}\n\n{said['folder']}")
        names = list(next(iter(said["scales"].values())))
        configs = [[n, *(json.dumps(c[n]) for c in said["scales"].values())] for n in names]
        timed = [f"{scale} ({_time(said['minutes'].get(scale))})" for scale in said["scales"]]
        print_table(plain_table(["config", *timed], configs))
        rows = []
        for claim in said["claims"]:
            paper = claim["paper_value"]
            expected = [claim["expected"].get(scale, "–") for scale in said["scales"]]
            rows.append([claim["statement"], claim["source"], paper, *expected])
        print_table(plain_table(["claim", "source", "paper", *said["scales"]], rows))


@app.command()
def run(
    study: StudyName,
    scale: Annotated[str, typer.Option(help="smoke, quick or paper.")] = "quick",
    seeds: Annotated[
        int | None, typer.Option(help="Scale the seeds of every part.", show_default=False)
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a config field; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder; runs/<study>-<scale> without it.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes; one a core without it.", show_default=False),
    ] = None,
    backend: Annotated[str, typer.Option(help="Where units are computed: local.")] = "local",
    strict: Annotated[
        bool, typer.Option("--strict", help=f"Exit with {EXIT_CLAIM} if a claim fails.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a study, or what of it is not on disk yet, and hold its claims against the numbers."""
    with errors_on_one_line():
        from interp.case_studies.settings import parse_assignments
        from interp.terminal import TerminalProgress
        from interp.workflows import run_study

        result = run_study(
            study,
            scale=scale,
            seeds=seeds,
            overrides=parse_assignments(assign or []),
            out=out,
            workers=workers,
            backend=backend,
            device=device,
            dtype=dtype,
            progress=None if quiet or as_json else TerminalProgress(),
        )
        _print_run(result, as_json=as_json, quiet=quiet)
    _exit_for(result, strict=strict)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    strict: Annotated[
        bool, typer.Option("--strict", help=f"Exit with {EXIT_CLAIM} if a claim fails.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Judge a finished run and draw its report again, from disk; computes nothing."""
    with errors_on_one_line():
        from interp.workflows import redraw_report

        refuse("--device", device, ["cpu"], "drawing a report")
        refuse("--dtype", dtype, [], "drawing a report")
        result = redraw_report(folder)
        _print_run(result, as_json=as_json, quiet=quiet)
    _exit_for(result, strict=strict)


app.command()(cli_tools.bench)
app.command()(cli_tools.doctor)
app.command()(cli_tools.cache)
app.command()(cli_models.fetch)
app.command()(cli_models.observe)


def main() -> None:
    """Entry point of the ``interp`` command."""
    app()


def _print_run(result: "RunResult", *, as_json: bool, quiet: bool) -> None:
    if as_json:
        record = result.record
        return print_json(
            {
                "study": record["study"],
                "scale": record["scale"],
                "folder": str(result.folder),
                "report": str(result.report),
                "result_hash": result.result_hash,
                "computed": result.n_computed,
                "units": len(result.results),
                "seconds": record["seconds"],
                "claims": result.judged,
                "figure_errors": dict(result.figure_errors or {}),
            }
        )
    if quiet:
        return None
    from interp.terminal import claims_table, print_table, say

    say(f"\n{result.title}", style="bold")
    print_table(claims_table(result.judged))
    say(result.summary)
    say(f"report: {result.report}")
    return None


def _exit_for(result: "RunResult", *, strict: bool) -> None:
    from interp.terminal import complain

    for name, error in (result.figure_errors or {}).items():
        complain(f"figure {name} could not be drawn: {error}")
    if strict and not result.all_reproduced:
        failed = [said["id"] for said in result.judged if said["verdict"] == "not reproduced"]
        complain(f"not reproduced: {', '.join(failed)}")
        raise typer.Exit(EXIT_CLAIM)
    if result.figure_errors:
        raise typer.Exit(EXIT_FAILED)


def _minutes(minutes: dict[str, float]) -> str:
    return ", ".join(f"{scale} {_time(value)}" for scale, value in minutes.items())


def _time(minutes: float | None) -> str:
    if minutes is None:
        return "?"
    return f"{minutes * 60:.0f} s" if minutes < 1 else f"{minutes:g} min"
