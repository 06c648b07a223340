"""Trains the best layouts of a plan for a few steps: ``dtrain plan FILE --trials N``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.loading import load_torch_hosts
from dtrain.messages.trial import TrialLine, trial_line
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.question import Answer
from dtrain.parallelism.trial import MOST_TRIALS, Case, MeasuredCase, Trial, cases, unsupported
from dtrain.planning.request import PlanRequest
from dtrain.planning.written import keys_of

if TYPE_CHECKING:
    from dtrain.failures.cause import Report
    from dtrain.runs.request import Request
    from dtrain.session.reporting.callbacks import Line, OnLine

PROGRAM = "dtrain.runtime.torch.trial"
KEPT = ("env", "setup", "workdir", "sync", "binding", "grace")
"""Keys of the job that a trial has, too: it runs in the same environment."""
_MODEL = (
    "hidden", "heads", "kv_heads", "head_size", "ffn_hidden", "vocab", "gated", "tied", "experts",
    "experts_per_token",
)  # fmt: skip
SECONDS = 2.0
"""Of the measured steps of one case; there are at least five."""
SILENCE = 300
"""Seconds without output after which a trial counts as hanging."""
_OUT_OF_MEMORY = ("cuda-out-of-memory", "host-out-of-memory", "memory-limit", "cpu-out-of-memory")
"""Entries of ``signatures.yaml``."""

LaunchTrial = Callable[["Request", "OnLine"], "Report"]
"""Launches a request, and passes each line of output on."""


def trainable(request: PlanRequest) -> Request:
    """Return the cluster file of a request with trials.

    Raises UsageError, and SpecError if the file of a trial would be invalid.
    """
    if not 1 <= request.trials <= MOST_TRIALS:
        raise UsageError(
            f"`trials={request.trials}` is not a number of layouts",
            hint=f"1 to {MOST_TRIALS}, such as 3",
        )
    found = load_torch_hosts(request.file, request.settings, "trials", "train")
    if request.framework not in (None, "torch"):
        raise UsageError(
            f"`trials` trains with torch, but `framework` is {request.framework}",
            hint="leave `trials` out",
        )
    # Its errors must come before a probe, which takes a minute.
    _request(found, {}, []).spec()
    return found


def tried(
    answer: Answer, count: int, file: Request, launch: LaunchTrial, notice: Callable[[str], None]
) -> Answer:
    """Train the best ``count`` layouts, one after the other. Return the answer with the results.

    Raises UsageError if they cannot be trained, and KeyboardInterrupt if the user stops a trial.
    """
    from dtrain.parallelism.answer.explain import brief  # few plans train layouts

    question = answer.question
    chosen = answer.shortlist(count) if answer.fits else ()
    if not chosen:
        raise UsageError("`trials` trains layouts that fit, and there is none", hint="leave it out")
    if reason := unsupported(question.shape, chosen[0].layout):
        raise UsageError(f"no trials of this plan: {reason}", hint="leave `trials` out")
    ranks = sum(host.workers for host in file.spec().cluster.hosts)
    if question.cluster.gpus != ranks:
        raise UsageError(
            f"`trials` trains on the hosts of {file.file}, which run {ranks} ranks, but the plan "
            f"is for {question.cluster.gpus} GPUs",
            hint="leave out `gpus` and `gpus_per_host`, or `trials`",
        )
    found = []
    for number, candidate in enumerate(chosen, 1):
        notice(f"trial {number} of {len(chosen)}: {brief(candidate)}")
        found.append(_trial(answer, candidate, file, launch))
    return replace(answer, trials=tuple(found))


def _trial(answer: Answer, candidate: Candidate, file: Request, launch: LaunchTrial) -> Trial:
    wanted = cases(candidate.shape, candidate.layout)
    lines: dict[Case, MeasuredCase] = {}

    def on_line(line: Line) -> None:
        found = trial_line(line.text) if line.rank == 0 and line.stream == "stdout" else None
        if found is not None:
            lines[Case(found.layers, found.micro_batches)] = _measured(found)

    shape = asdict(candidate.shape)
    order = {
        "model": {name: shape[name] for name in _MODEL},
        "seconds": SECONDS,
        "cases": [[case.layers, case.micro_batches] for case in wanted],
    }
    steps = wanted[-1].micro_batches
    keys = keys_of(answer.question, replace(candidate.layout, grad_accumulation=steps))
    report = launch(_request(file, keys, [json.dumps(order)]), on_line)
    if report.exit_code is ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    measured = tuple(lines[case] for case in wanted if case in lines)
    if report.ok and len(measured) == len(wanted):
        return Trial(candidate, measured, run=report.run)
    first = report.failures[0] if report.failures else None
    known = first.explanation if first is not None else None
    return Trial(
        candidate,
        measured,
        failure=_cause(report) if not report.ok else "its first rank printed no measurement",
        hint=report.hint,
        out_of_memory=known is not None and known.id in _OUT_OF_MEMORY,
        run=report.run,
    )


def _cause(report: Report) -> str:
    """Why a trial failed, in one line."""
    first = report.failures[0] if report.failures else None
    message = first.message if first is not None else ""
    return f"{report.reason}: {message}" if message else report.reason


def _measured(line: TrialLine) -> MeasuredCase:
    case = Case(line.layers, line.micro_batches)
    return MeasuredCase(case, line.seconds, line.fastest, line.allocated, line.resident)


def _request(file: Request, keys: dict[str, Any], args: list[str]) -> Request:
    """The cluster file of a trial, whose job has these ``keys`` and ``args``."""
    from dtrain.spec.other_job import with_job

    own = file.spec().job.rendezvous
    first, last = own.ports
    job: dict[str, Any] = {
        "framework": "torch",
        # Without torchrun, so that each line has its rank.
        "rendezvous": {"ports": f"{first}-{last}", **({"port": own.port} if own.port else {})},
        "module": PROGRAM,
        "args": args,
        **keys,
        "watchdog": {"silence": SILENCE},
        # Nobody waits for a trial whose launcher is gone.
        "on_disconnect": "stop",
        "lease": 30,
    }
    name = f"{file.spec().name[:58]}-trial"  # a name has at most 64 characters
    text = with_job(file.text, file.settings, job, keep=KEPT, name=name)
    return replace(file, text=text, settings=(), args=(), env=None)
