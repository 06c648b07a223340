"""`dtrain check`: what would make a job fail, hang or crawl, before it is launched."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from dtrain.checks import Evidence, Severity, judge
from dtrain.checks import bandwidth as fabric
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.framing import clean
from dtrain.launchplan.plan import LaunchPlan, build
from dtrain.session.ports import draw_ports
from dtrain.session.preflight import THOROUGH, Preflight, over
from dtrain.spec.load import read
from dtrain.transport.questions import Ask, never
from dtrain.transport.select import Transports
from dtrain_cli import prompt
from dtrain_cli.files import write_text
from dtrain_cli.output import write
from dtrain_cli.sheet import stdout_paper
from dtrain_cli.views import findings as view
from dtrain_cli.views import names


def check(
    file: Annotated[Path, typer.Argument(help="The cluster file.", metavar="FILE")],
    rendezvous: Annotated[
        bool,
        typer.Option("--rendezvous", help="Also start a real process group, and end it again."),
    ] = False,
    bandwidth: Annotated[
        bool,
        typer.Option("--bandwidth", help="Also measure the speed of all-reduces and links."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="With --bandwidth: write what `dtrain plan --calibrate` reads.", metavar="FILE"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find what would make a job fail, hang or slow down.

    Looks at all hosts at once. Starts no job, but runs the setup lines and imports the framework
    as a launch would. Exit code 3 means that a launch would fail, 0 that nothing is worse than a
    warning.
    """
    spec = read(file)
    if bandwidth and spec.job.framework != "torch":
        raise UsageError(
            "--bandwidth measures with torch.distributed, and this is a TensorFlow job",
            hint="check a copy of the file that says `framework: torch`",
        )
    if output is not None and not bandwidth:
        raise UsageError("--output is for what --bandwidth measures", hint="add --bandwidth")
    if rendezvous or bandwidth:
        # The rehearsal starts each rank by itself, whatever backend starts the job.
        direct = replace(spec.job.rendezvous, backend="direct")
        spec = replace(spec, job=replace(spec.job, rendezvous=direct))
    plan = build(spec, port=draw_ports(spec)[0], local_python=sys.executable)
    begun = time.monotonic()
    with progress(f"checking {names.count(len(plan.hosts), 'host')} …"):
        evidence = _look(plan, file.absolute().parent, rendezvous=rendezvous, bandwidth=bandwidth)
    found = judge(evidence)
    seconds = time.monotonic() - begun
    write(
        view.as_json(evidence, found)
        if json
        else view.as_text(evidence, found, seconds, stdout_paper())
    )
    if output is not None:
        _write_calibration(evidence, output)
    fails = any(finding.severity is Severity.ERROR for finding in found)
    raise typer.Exit(ExitCode.NODE_FAILED if fails else ExitCode.OK)


def _write_calibration(evidence: Evidence, output: Path) -> None:
    measured = fabric.fabric(evidence)
    if measured is None or not measured.collectives:
        notice(f"{output} is not written: there is no measurement of two ranks or more")
        return
    write_text(output, dumps(fabric.calibration(measured), indent=2) + "\n")
    notice(f"{output} written; use it with: dtrain plan --calibrate {output}")


def _look(plan: LaunchPlan, base: Path, *, rendezvous: bool, bandwidth: bool) -> Evidence:
    transport = Transports(base, asker(), notice=notice)
    preflight = Preflight(plan, over(transport), base=base)
    try:
        evidence = preflight.look(THOROUGH)
        if rendezvous:
            evidence = preflight.rehearse(evidence)
        if bandwidth:
            evidence = preflight.measure(evidence)
        return evidence
    finally:
        preflight.close()
        transport.close()


def asker() -> Ask | None:
    """How to ask the person at the terminal; None where nobody is there to answer."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None

    def ask(
        text: str, /, *, echo: bool = False, unwanted: Callable[[], bool] = never
    ) -> str | None:
        return prompt.ask(text, unwanted, echo=echo)

    return ask


def notice(text: str) -> None:
    """Tell on stderr what a person should know and did not ask for."""
    if sys.stderr is not None:
        sys.stderr.write(f"dtrain: {clean(text)}\n")


@contextmanager
def progress(text: str) -> Iterator[None]:
    """``text`` on the terminal for as long as it takes."""
    shown = sys.stderr is not None and sys.stderr.isatty()
    if shown:
        sys.stderr.write(text)
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
