"""`dtrain check`: find what would make a job fail, hang or slow down, before the launch."""

from __future__ import annotations

import threading
import time
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from dtrain.checks import Evidence, Severity
from dtrain.checks import bandwidth as fabric
from dtrain.checks.judgement import judge
from dtrain.diagnostics import ExitCode, UsageError
from dtrain.engines.inspection import examine
from dtrain.loading import load
from dtrain.session.stopping.signals import on_signals
from dtrain.wording import counted
from dtrain_cli import prompt
from dtrain_cli.errors import warn
from dtrain_cli.files import JSON, writable, write_text
from dtrain_cli.options import errors_name_options
from dtrain_cli.output import notice, progress, stdout_paper, write
from dtrain_cli.parameters import ClusterFilePath, Settings, flag, option
from dtrain_cli.views import findings as view


def check(
    file: ClusterFilePath,
    settings: Settings = None,
    rendezvous: Annotated[
        bool, flag("Also start and stop a real process group.", "--rendezvous")
    ] = False,
    bandwidth: Annotated[
        bool, flag("Also measure the speed of all-reduces and links.", "--bandwidth")
    ] = False,
    output: Annotated[
        Path | None, option("With --bandwidth: write a file for `dtrain plan --calibrate`.", "FILE")
    ] = None,
    json: Annotated[bool, flag("Print one JSON object.", "--json")] = False,
) -> None:
    """Find what would make a job fail, hang or slow down.

    Checks all hosts in parallel. Starts no job, but runs the setup lines and imports the framework
    as a launch does. Exit code 3 means that a launch would fail; 0 means that nothing is worse than
    a warning.
    """
    request = load(file, settings=settings or ())
    if output is not None and not bandwidth:
        raise UsageError("--output requires --bandwidth", hint="add --bandwidth")
    if output is not None:
        writable(output, JSON)
    begun = time.monotonic()
    spec = request.spec()
    warn(spec)
    hosts = counted(len(spec.cluster.hosts), "host")
    asked = threading.Event()
    with (
        progress(f"checking {hosts} …"),
        errors_name_options(),
        on_signals(lambda _number: asked.set()),
    ):
        evidence = examine(
            request,
            rendezvous=rendezvous,
            bandwidth=bandwidth,
            ask=prompt.asker(cancelled=asked.is_set),
            on_notice=notice,
            stopped=asked.is_set,
        )
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
        notice(f"{output} is not written: no measurement covers two or more ranks")
        return
    write_text(output, dumps(fabric.calibration(measured), indent=2) + "\n")
    notice(f"{output} written; use it with: dtrain plan --calibrate {output}")
