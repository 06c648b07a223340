"""`dtrain exec`: run a command on all hosts of a cluster file or of a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dtrain import api
from dtrain.diagnostics import UsageError
from dtrain.engines.execution import exit_code
from dtrain.session.stopping.control import Control
from dtrain.session.stopping.signals import on_signals, stop_by_signal
from dtrain_cli import completion, prompt
from dtrain_cli.commands.select import seconds_of, unfolded
from dtrain_cli.options import errors_name_options
from dtrain_cli.parameters import Settings, argument, flag, option
from dtrain_cli.standard import unwritable
from dtrain_cli.views import color
from dtrain_cli.views.commands import CommandJson, CommandLines, CommandView
from dtrain_cli.views.outlet import Outlet


def exec(
    target: Annotated[
        str,
        argument(
            "A cluster file, or the name of a run or of its job, or its first characters.",
            "FILE|RUN",
            completion.files_and_runs,
        ),
    ],
    command: Annotated[
        list[str], argument("The command, after --. One word alone is a shell line.", "COMMAND")
    ],
    settings: Settings = None,
    host: Annotated[
        str | None, option("Only these hosts, e.g. gpu[01-03].", "HOSTS", completion.hosts)
    ] = None,
    timeout: Annotated[str | None, option("Stop the command after TIME, e.g. 30s.", "TIME")] = None,
    fold: Annotated[
        bool,
        typer.Option(
            "--fold/--no-fold",
            help="Show equal lines of several hosts once; default: on.",
            show_default=False,
        ),
    ] = True,
    json: Annotated[bool, flag("One JSON object per line.", "--json")] = False,
) -> None:
    """Run a command on all hosts of a cluster file or of a run.

    The command starts in your home folder on each host, without input. Ctrl-C stops it everywhere.
    The exit code is the worst of all hosts: 0 if the command returned 0 everywhere, 1 if it failed
    or reached the time limit on a host, 3 if a host failed, and 130 after Ctrl-C.
    """
    limit = seconds_of("--timeout", timeout)
    if limit == 0:
        raise UsageError("--timeout 0 leaves no time", hint="write e.g. 30s, 10m or 1h30m")
    stopping = _Stopping()
    control = stopping.control
    out, err = (Outlet(stream, stopping.on_failed_output) for stream in (sys.stdout, sys.stderr))
    hosts = None if host is None else unfolded("--host", host)
    view: CommandView = (
        CommandJson(out)
        if json
        else CommandLines(out, err, fold=fold, color=(color(out.terminal), color(err.terminal)))
    )
    with errors_name_options(), on_signals(stopping.on_signal):
        outcomes = api.execute(
            target,
            command,
            settings=settings or (),
            receiver=view,
            hosts=hosts,
            timeout=limit,
            control=control,
            ask=prompt.asker(cancelled=lambda: control.interrupted),
            on_notice=view.notice,
        )
        code = exit_code(outcomes, interrupted=control.interrupted)
        view.finished(outcomes, code)
    # Ctrl-C also ends a `tee` that reads the output.
    if stopping.output_error is not None and not stopping.signalled:
        raise unwritable(stopping.output_error)
    raise typer.Exit(code)


class _Stopping:
    """Stops the command on a signal, or when its output cannot be written."""

    def __init__(self) -> None:
        self.control = Control()
        self.signalled = False
        self.output_error: OSError | None = None

    def on_signal(self, number: int) -> None:
        self.signalled = True
        stop_by_signal(self.control, number)

    def on_failed_output(self, error: OSError) -> None:
        self.output_error = self.output_error or error
        self.control.hang_up("its output was closed")
