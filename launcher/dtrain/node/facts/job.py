"""Runs programs like the job: after its setup, with its own interpreter."""

from __future__ import annotations

import binascii
import contextlib
import json
import marshal
import os
import sys
import threading

from dtrain.node.boot import ISOLATED, boot_text
from dtrain.node.facts.code import why_unsafe_to_run
from dtrain.node.facts.files import expand, folder_to_run_in
from dtrain.node.facts.programs import run
from dtrain.node.setup import feed, reported_step, setup_script, setup_shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.facts.files import Json
    from dtrain.node.facts.job_copy import JobCopy
    from dtrain.node.facts.orders import GatherOrder, JobOrder, Program

LABEL = "dtrain-check"
STAGE = (
    "import json,os;d=json.loads(open(%d,'rb',0,closefd=False).readline());e=dict(os.environ);"
    "e.update(d['environment']);os.execvpe(d['argv'][0],d['argv'],e)"
)
"""Reads unbuffered: the data after the first line are for the program that it executes."""


def in_job(request: JobOrder, program: Program, limit: float) -> Json:
    """Run a program in the job's Python like a process of the job: in its folder, after the setup
    lines, with the job's environment on top of theirs. The answer's ``said`` has the lines that it
    wrote to the descriptor in DTRAIN_REPORT_FD."""
    unsafe = why_unsafe_to_run(request)
    if unsafe is not None:
        return {"status": 126, "said": [], "output": unsafe["seen"], "unsafe": True}
    workdir = folder_to_run_in(request)
    reports, report_fd = os.pipe()
    setup = request["setup"]
    environment = {**request["environment"], "DTRAIN_REPORT_FD": str(report_fd)}
    python = request["python"]
    python = expand(python) if python.startswith("~/") else python
    stream = binascii.a2b_base64(program["code"]) + marshal.dumps(program["options"], 4)
    lines: list[str] = []
    listener = threading.Thread(target=read_lines, args=(reports, lines), daemon=True)
    listener.start()
    try:
        if setup:
            status, out, err = after_setup(
                setup, report_fd, python, stream, environment, workdir, limit
            )
        else:
            everything = {**os.environ, **environment}
            argv = [python, "-c", boot_text(isolated=False), LABEL]
            status, out, err = run(
                argv, limit, cwd=workdir, environment=everything, feed=stream, pipes=(report_fd,)
            )
    except OSError as error:
        os.close(report_fd)
        return {
            "status": 127,
            "said": [],
            "output": "%s: %s" % (error.filename or python, error.strerror),
        }
    listener.join(1.0)
    numbered = [(reported_step(line), line) for line in lines]
    steps = [step for step, _ in numbered if step is not None]
    said = [line for step, line in numbered if step is None]
    found: Json = {"status": status, "said": said, "output": (out + err).strip()[-4000:]}
    if setup and (not steps or steps[-1] <= len(setup)):
        found["failed_setup"] = steps[-1] if steps else 1
    return found


def after_setup(
    setup: list[str],
    report_fd: int,
    python: str,
    program: bytes,
    environment: dict[str, str],
    workdir: str,
    limit: float,
) -> tuple[int | None, str, str]:
    """`run` through a shell that runs the setup lines and reports each. Raises OSError."""
    stage_fd, feed_fd = os.pipe()  # the last stage reads from it, and we write to it
    boot = boot_text('open(%d,"rb")' % stage_fd, isolated=False)
    plan = {"environment": environment, "argv": [python, "-c", boot, LABEL]}
    feed(feed_fd, json.dumps(plan).encode() + b"\n" + program)
    stage = [sys.executable, ISOLATED, "-c", STAGE % stage_fd]
    # A descriptor with two digits needs this path in a plain sh.
    script = setup_script(setup, stage, report=">/proc/self/fd/%d" % report_fd)
    everything = {**os.environ, "DTRAIN_SETUP": script}
    if "/" in python:
        # As in a launch, setup lines find pip and others of the job's Python.
        folder = os.path.join(workdir, os.path.dirname(python))
        everything["PATH"] = folder + ":" + os.environ.get("PATH", os.defpath)
    pipes = report_fd, stage_fd
    return run(setup_shell(), limit, cwd=workdir, environment=everything, pipes=pipes)


def read_lines(fd: int, lines: list[str]) -> None:
    with contextlib.suppress(OSError), os.fdopen(fd, errors="backslashreplace") as file:
        for line in file:
            lines.append(line.rstrip("\n"))


def interpreter(request: GatherOrder, copy: JobCopy | None = None) -> Json:
    """The facts that `dtrain.node.interpreter` reports: in ``copy``, or else, sent by the launcher,
    in the job's Python."""
    program = request["interpreter"]
    if copy is not None:
        said = copy.said(program["limit"])
        if said is None:
            return {"status": None}
        with contextlib.suppress(ValueError, TypeError):  # a new Python shows why
            return {"status": 0, **json.loads(said)}
    answer = in_job(request, program, program["limit"])
    for line in answer.pop("said"):
        # A setup line may write there.
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            answer.update(json.loads(line))
    if "python" in answer:
        # The output of a setup that succeeds is not needed and may contain secrets.
        del answer["output"]
    return answer
