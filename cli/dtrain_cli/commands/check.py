"""`dtrain check`: what would make a job fail, hang or crawl, before it is launched."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dtrain.check import Evidence, Finding, Severity, bandwidth, judge
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.framing import clean
from dtrain.launchplan import LaunchPlan, build
from dtrain.spec.load import read
from dtrain.transport.questions import Ask, never
from dtrain_cli import prompt
from dtrain_cli.files import write_text
from dtrain_cli.sheet import stdout_paper
from dtrain_cli.views import findings as view
from dtrain_cli.views import names


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `dtrain check`."""

    file: Path
    rendezvous: bool
    bandwidth: bool
    output: Path | None
    """Where the calibration file goes."""
    json: bool


def check(options: Options) -> tuple[str, ExitCode]:
    """The findings as text for stdout, and the exit code. Ctrl-C ends it at once, and the hosts
    clean up behind it."""
    spec = read(options.file)
    if options.bandwidth and spec.job.framework != "torch":
        raise UsageError(
            "--bandwidth measures with torch.distributed, and this job is of TensorFlow",
            hint="check a copy of the file that says `framework: torch`",
        )
    if options.output is not None and not options.bandwidth:
        raise UsageError("--output is for what --bandwidth measures", hint="add --bandwidth")
    if options.rendezvous or options.bandwidth:
        # What is rehearsed is each rank by itself, whoever will start it.
        direct = replace(spec.job.rendezvous, backend="direct")
        spec = replace(spec, job=replace(spec.job, rendezvous=direct))
    plan = build(spec, local_python=sys.executable)
    begun = time.monotonic()
    with progress(f"checking {names.count(len(plan.hosts), 'host')} …"):
        evidence, found = _look(plan, options)
    seconds = time.monotonic() - begun
    text = (
        view.as_json(evidence, found)
        if options.json
        else view.as_text(evidence, found, seconds, stdout_paper())
    )
    if options.output is not None:
        _write_calibration(evidence, options.output)
    fails = any(finding.severity is Severity.ERROR for finding in found)
    return text, ExitCode.NODE_FAILED if fails else ExitCode.OK


def _write_calibration(evidence: Evidence, output: Path) -> None:
    measured = bandwidth.fabric(evidence)
    if measured is None or not measured.collectives:
        notice(f"{output} is not written: there is no measurement of two ranks or more")
        return
    write_text(output, json.dumps(bandwidth.calibration(measured), indent=2) + "\n")
    notice(f"{output} written; use it with: dtrain plan --calibrate {output}")


def _look(plan: LaunchPlan, options: Options) -> tuple[Evidence, tuple[Finding, ...]]:
    # Session brings threads and transports, which `--help` has no use for.
    from dtrain.session.preflight import THOROUGH, Preflight, over
    from dtrain.transport.select import Transports

    base = options.file.absolute().parent
    transport = Transports(base, asker(), notice=notice)
    preflight = Preflight(plan, over(transport), base=base)
    try:
        evidence = preflight.look(THOROUGH)
        if options.rendezvous:
            evidence = preflight.rehearse(evidence)
        if options.bandwidth:
            evidence = preflight.measure(evidence)
        return evidence, judge(evidence)
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
