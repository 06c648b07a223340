"""The Python API: launch, plan and check with one call each. The command line uses it too.

    import dtrain

    report = dtrain.launch("cluster.yaml", args=["--lr", "3e-4"], on_line=print)
    if not report.ok:
        print(report.reason, report.hint)

    run = dtrain.launch("cluster.yaml", detach=True)
    run.wait()

    print(dtrain.plan(dtrain.PlanRequest(model_size="70B", gpus=64)).best.layout)
    for finding in dtrain.check("cluster.yaml"):
        print(finding.severity, finding.seen)

Functions raise `UsageError` or `SpecError` only for invalid input. A job that fails, or a host
that cannot be reached, results in a `Report` or a `Finding`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from dtrain.diagnostics import DtrainError, ExitCode, UsageError
from dtrain.loading import Spec, load, refuse_text

if TYPE_CHECKING:
    from dtrain.checks import Finding
    from dtrain.engines.contract import Engine
    from dtrain.failures.cause import Report
    from dtrain.parallelism.question import Answer
    from dtrain.parallelism.tensorflow.verdict import TensorFlowPlan
    from dtrain.planning.request import PlanRequest
    from dtrain.runs.progress import Progress
    from dtrain.runs.request import Request
    from dtrain.runs.status import RunStatus
    from dtrain.session.caller import Caller
    from dtrain.session.relays.commands import Outcome, Receiver
    from dtrain.session.reporting.callbacks import OnLine, OnState
    from dtrain.session.reporting.observer import Observer
    from dtrain.session.stopping.control import Control
    from dtrain.transport.questions import Ask


@overload
def launch(
    spec: Spec,
    *,
    detach: Literal[True],
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    check: bool = True,
) -> LaunchedRun: ...


@overload
def launch(
    spec: Spec,
    *,
    detach: Literal[False] = False,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    check: bool = True,
    on_line: OnLine | None = None,
    on_state: OnState | None = None,
    on_notice: Callable[[str], object] | None = None,
    on_progress: Callable[[Progress], object] | None = None,
    on_running: Callable[[str], None] | None = None,
    control: Control | None = None,
    signals: bool = False,
    observer: Observer | None = None,
    ask: Ask | None = None,
) -> Report: ...


def launch(
    spec: Spec,
    *,
    detach: bool = False,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    check: bool = True,
    on_line: OnLine | None = None,
    on_state: OnState | None = None,
    on_notice: Callable[[str], object] | None = None,
    on_progress: Callable[[Progress], object] | None = None,
    on_running: Callable[[str], None] | None = None,
    control: Control | None = None,
    signals: bool = False,
    observer: Observer | None = None,
    ask: Ask | None = None,
) -> Report | LaunchedRun:
    """Launch a job on all its hosts, and wait until it ends and all its processes are gone.
    Like `attach`, it returns early if no host can be reached.

    Works in any thread. Several launches may run at the same time.

    - ``args`` are appended to ``job.args``, and ``env`` overrides ``job.env``.
    - ``secrets``: values of ``job.secrets`` and the URL of ``notify.webhook``; by default from the
      environment of this process.
    - ``check``: whether to check the hosts first.
    - ``on_line``, ``on_state``, ``on_notice`` and ``on_progress`` are called in order, one at a
      time, in a thread of the launch; a slow one delays the return, never the job. If one raises,
      the job is stopped, and `launch` raises that exception.
    - ``on_running`` gets the run's name once all workers have started, or a queue has the job,
      possibly in another thread.
    - ``control``: its ``stop()``, called in another thread or in a callback, ends the job.
    - ``signals``: Ctrl-C, SIGTERM and a closed terminal stop the job cleanly. Only in the main
      thread. Without it, `launch` installs no signal handlers. If one of the program's handlers
      raises, as Python's own does on Ctrl-C (KeyboardInterrupt), the job is stopped, and `launch`
      raises that exception once the job has ended. A second one kills the workers.
    - ``observer`` gets everything that happens, instead of the callbacks.
    - ``ask`` asks a person for passphrases; without it no question is asked.
    - ``detach``: return once all workers have started or a queue has the job, or once that has
      failed. A background process then controls the run; the handle refers to it.

    Returns the report, even if the job failed. Raises UsageError and SpecError for invalid input,
    before anything starts; with an ``observer``, each DtrainError that prevents the start.
    """
    from dtrain.engines.slurm import allocation
    from dtrain.failures.cause import Report
    from dtrain.session.stopping.interruption import uninterrupted
    from dtrain.spec.secrets import secret_values

    request = load(spec, args=args, env=env)
    inside = allocation.current(request.spec(), os.environ)
    request = replace(request, check=check, allocation=inside)
    callbacks = (on_line, on_state, on_notice, on_progress)
    if detach:
        if signals or any(each is not None for each in (*callbacks, on_running, control, observer)):
            raise UsageError(
                "a detached launch has no callbacks, control, observer or signals",
                hint="use the handle that `launch` returns",
            )
    elif observer is not None and any(callbacks):
        raise UsageError(
            "an observer replaces the callbacks", hint="pass an observer or callbacks, not both"
        )
    if signals and threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "signals=True works only in the main thread",
            hint="remove it, and stop the job with a Control",
        )
    values = secret_values(request.spec(), os.environ if secrets is None else secrets)
    if detach:
        from dtrain.engines.background import start

        return LaunchedRun(start(request, values))
    caller = _caller(observer, control, ask, on_running)
    if observer is not None:
        with _starting(request, caller, signals) as engine:
            return uninterrupted(lambda: engine.run(values), caller.control.stop)
    from dtrain.session.reporting.callbacks import Callbacks

    received = Callbacks(caller.control, *callbacks)
    try:
        with _starting(request, replace(caller, observer=received.feed), signals) as engine:
            report = uninterrupted(lambda: engine.run(values), caller.control.stop)
    except DtrainError as error:
        if error.exit_code is ExitCode.INVALID:
            raise
        report = Report(error.exit_code, error.message, hint=error.hint)
    finally:
        received.close()
    return report


def attach(
    run: str,
    *,
    observer: Observer | None = None,
    control: Control | None = None,
    ask: Ask | None = None,
) -> Report:
    """Follow an earlier run until it ends, and return its report.

    Takes over the run if its launcher is gone. ``control.leave()`` returns early and leaves the job
    running; the exit code in the report is then INTERRUPTED. Ctrl-C leaves it, too. The exit code
    is NODE_FAILED, and the job may go on, if no host can be reached for
    ``job.restart.node_timeout``. ``run`` is the name of a run or
    of its job, or the start of the name; of several runs, it means the one that is not over.
    Returns the report of a run that has ended. Raises UsageError if there is no such run, or if
    several are not over.
    """
    from dtrain.engines import existing
    from dtrain.runs.status import find_run
    from dtrain.session.stopping.interruption import uninterrupted

    folder, caller = find_run(run), _caller(observer, control, ask)
    return uninterrupted(lambda: existing.attach(folder, caller), lambda _: caller.control.leave())


def stop(
    run: str,
    *,
    force: bool = False,
    observer: Observer | None = None,
    control: Control | None = None,
    ask: Ask | None = None,
) -> ExitCode:
    """Stop a run on all its hosts, and wait until it ends. ``force`` kills immediately.

    Returns OK if the run stopped, INTERRUPTED if ``control`` ended the wait early, else the exit
    code of a run that failed first. Raises UsageError if there is no such run, or if it has ended.
    """
    from dtrain.engines import existing
    from dtrain.runs.status import find_run
    from dtrain.session.stopping.interruption import uninterrupted

    folder, caller = find_run(run), _caller(observer, control, ask)
    return uninterrupted(lambda: existing.stop(folder, caller, force=force), caller.control.stop)


def execute(
    target: Spec,
    argv: Sequence[str],
    *,
    settings: Sequence[str] = (),
    receiver: Receiver | None = None,
    hosts: Collection[str] | None = None,
    timeout: float | None = None,
    control: Control | None = None,
    ask: Ask | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> list[Outcome]:
    """Run a command on all hosts of ``target``, or on ``hosts``, and wait until it has ended.

    ``target`` is a spec as for `launch`, or a run as for `attach`; for ``settings`` see `load`. One
    word alone in ``argv`` is a line for ``/bin/sh``. ``timeout``: seconds after which the command
    is stopped. ``control.stop()`` and Ctrl-C stop it on all hosts. ``receiver`` gets the output.
    Raises UsageError and SpecError for invalid input; a host that cannot be reached is an `Outcome`
    with an error.
    """
    from dtrain.engines.execution import execute as run_commands
    from dtrain.runs.record import Record
    from dtrain.runs.status import find_run
    from dtrain.session.relays.commands import Receiver
    from dtrain.session.stopping.control import Control
    from dtrain.session.stopping.interruption import uninterrupted

    refuse_text("argv", argv)
    record = None
    # A file that is missing is `load`'s to report. (`Path.exists` raises for a long name.)
    if (
        isinstance(target, str)
        and "/" not in target
        and not target.endswith((".yaml", ".yml", ".json"))
        and not os.path.exists(target)  # noqa: PTH110
    ):
        record = Record.load(find_run(target).path)
        if settings:
            raise UsageError(
                f"`settings` needs a cluster file, but {target!r} is a run",
                hint="a run keeps the settings that it was launched with",
            )
    request = load(target, settings=settings) if record is None else record.request
    control = control or Control()

    def run() -> list[Outcome]:
        return run_commands(
            request,
            record,
            argv,
            hosts=hosts,
            limit=timeout,
            receiver=receiver or Receiver(),
            control=control,
            ask=ask,
            notice=on_notice or (lambda text: None),
        )

    return uninterrupted(run, control.stop)


def _caller(
    observer: Observer | None,
    control: Control | None,
    ask: Ask | None,
    on_running: Callable[[str], None] | None = None,
) -> Caller:
    from dtrain.session.caller import Caller
    from dtrain.session.reporting.observer import Observer
    from dtrain.session.stopping.control import Control

    return Caller(
        observer or Observer(), control or Control(), ask, on_running or (lambda run: None)
    )


@contextmanager
def _starting(request: Request, caller: Caller, signals: bool) -> Iterator[Engine]:
    from dtrain.engines.select import engine
    from dtrain.session.stopping.signals import on_signals, stop_by_signal

    with ExitStack() as stack:
        if signals:
            stack.enter_context(on_signals(lambda number: stop_by_signal(caller.control, number)))
        yield stack.enter_context(engine(request, caller, starts=True))


class LaunchedRun:
    """A run that a background process controls."""

    def __init__(self, name: str) -> None:
        """``name`` is the name of a run or of its job, or the start of the name, as for `attach`.
        Raises UsageError if there is no such run."""
        from dtrain.runs.status import find_run

        self._folder = find_run(name)

    def __repr__(self) -> str:
        return f"LaunchedRun({self.name!r})"

    @property
    def name(self) -> str:
        return self._folder.name

    @property
    def logs(self) -> Path:
        """The folder of the run's records and its workers' output."""
        return self._folder.path

    def status(self, *, ask_hosts: bool = False) -> RunStatus:
        """The state of the run, from the records on this machine. With ``ask_hosts``, the hosts of
        a run without a launcher report their own state."""
        from dtrain.runs.status import status

        found = status(self._folder)
        if not ask_hosts or found.state != "unattended":
            return found
        from dtrain.engines import select
        from dtrain.runs.record import Record
        from dtrain.session.caller import Caller

        record = Record.load(self._folder.path)
        with select.engine(record.request, Caller()) as engine:
            return replace(found, hosts=engine.status(record, found.hosts))

    def wait(self, timeout: float | None = None) -> Report:
        """Wait until the run ends, and return its report. Takes over if its launcher is gone. Like
        `attach`, it returns early if no host can be reached.

        Raises TimeoutError after ``timeout`` seconds; the run continues.
        """
        from dtrain.session.reporting.follow import ending_after
        from dtrain.session.stopping.control import Control

        control = Control()
        timer = threading.Timer(timeout or 0.0, control.leave)
        timer.daemon = True

        def follow() -> Report | None:
            report = attach(self.name, control=control)
            return None if control.left else report

        if timeout is not None:
            timer.start()
        try:
            report = ending_after(self._folder, follow)
        finally:
            timer.cancel()
        if report is None:
            raise TimeoutError(f"run {self.name} is still running after {timeout:g} s")
        return report

    def stop(self, *, force: bool = False) -> Report:
        """Stop the run on all its hosts, and return its report. ``force`` kills immediately."""
        from dtrain.session.reporting.follow import ending_after

        def end() -> None:
            stop(self.name, force=force)

        if (report := ending_after(self._folder, end)) is None:
            raise UsageError(f"run {self.name} has no record of its end")
        return report


def check(spec: Spec, *, rendezvous: bool = False, bandwidth: bool = False) -> list[Finding]:
    """Find what would make the job fail, hang or slow down, worst first. Does not start the job.

    ``rendezvous``: also start and end a real process group. ``bandwidth``: also measure the speed
    of links. Raises UsageError and SpecError for invalid input; a host that cannot be reached is a
    finding.
    """
    from dtrain.checks.judgement import judge
    from dtrain.engines.inspection import examine

    return list(judge(examine(load(spec), rendezvous=rendezvous, bandwidth=bandwidth)))


@overload
def plan(
    request: PlanRequest,
    *,
    strategies: Literal[False] = False,
    ask: Ask | None = None,
    on_notice: Callable[[str], None] | None = None,
    signals: bool = False,
) -> Answer: ...


@overload
def plan(
    request: PlanRequest,
    *,
    strategies: Literal[True],
    ask: Ask | None = None,
    on_notice: Callable[[str], None] | None = None,
    signals: bool = False,
) -> Answer | TensorFlowPlan: ...


def plan(
    request: PlanRequest,
    *,
    strategies: bool = False,
    ask: Ask | None = None,
    on_notice: Callable[[str], None] | None = None,
    signals: bool = False,
) -> Answer | TensorFlowPlan:
    """How to split a model over a cluster: ``answer.best`` is the layout, if ``answer.fits``.

    - ``strategies``: whether to accept a job for TensorFlow, which has strategies, not layouts.
    - ``ask`` asks a person for passphrases, if a host or Slurm must be asked.
    - ``on_notice`` gets a line before each trial, and about hosts that do not answer; ``signals``
      is as for `launch`, while one runs.

    Raises UsageError and SpecError for invalid input, and DtrainError if ``request.probe`` fails.
    """
    from dtrain import probing, trials
    from dtrain.planning.request import check_request

    check_request(request)
    trained = trials.trainable(request) if request.trials else None
    show = on_notice or (lambda _: None)
    question = probing.posed(request, ask, show)
    if question.framework == "torch":
        answer = question.answer()
        if trained is None:
            return answer

        def run(job: Request, on_line: OnLine) -> Report:
            return launch(job, on_line=on_line, signals=signals, ask=ask)

        return trials.tried(answer, request.trials, trained, run, show)
    if not strategies:
        raise UsageError(
            "for TensorFlow, the planner chooses a strategy, not a layout",
            hint="call `plan` with strategies=True",
        )
    from dtrain.parallelism.tensorflow import judge

    return judge.answer(question)
