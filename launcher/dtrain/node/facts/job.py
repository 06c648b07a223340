"""Running something as the job would: after its setup, with its own interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading

from dtrain.node.boot import ISOLATED, boot_text, framed
from dtrain.node.facts.code import why_unsafe_to_run
from dtrain.node.facts.files import expand
from dtrain.node.facts.programs import find_program, run
from dtrain.node.trust import Trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.facts.files import Json

LABEL = "dtrain-check"
STAGE = (
    "import json,os;d=json.loads(open(%d,'rb',0,closefd=False).readline());e=dict(os.environ);"
    "e.update(d['environment']);os.execvpe(d['argv'][0],d['argv'],e)"
)
"""Unbuffered: what follows the first line is for the program that it becomes."""


def in_job(request: Json, program: Json, limit: float) -> Json:
    """Run a program in the job's Python as the job's processes are run: in its folder, after the
    setup lines, and with the environment laid over theirs. ``program`` is its packed ``code`` and
    its ``options``, see `dtrain.node.boot`. What it wrote to the descriptor that DTRAIN_SAY names
    comes back in ``said``, line by line."""
    workdir = expand(request["workdir"])
    unsafe = why_unsafe_to_run(request)
    if unsafe is not None:
        return {"status": 126, "said": [], "output": unsafe["seen"], "unsafe": True}
    try:
        # Once this succeeds, no other user can make or replace the folder.
        os.close(Trust(request.get("trust_group")).open_folder(os.fsencode(workdir))[0])
    except OSError:
        workdir = os.path.expanduser("~")
    say, told = os.pipe()
    setup = request.get("setup") or []
    environment = {**request["environment"], "DTRAIN_SAY": str(told)}
    python = request["python"]
    python = expand(python) if python.startswith("~/") else python
    feed = framed(program["code"].encode()) + json.dumps(program["options"]).encode() + b"\n"
    lines: list[str] = []
    listener = threading.Thread(target=hear, args=(say, lines), daemon=True)
    listener.start()
    try:
        if setup:
            status, out, err = after_setup(setup, told, python, feed, environment, workdir, limit)
        else:
            everything = {**os.environ, **environment}
            argv = [python, "-c", boot_text(isolated=False), LABEL]
            status, out, err = run(
                argv, limit, cwd=workdir, environment=everything, feed=feed, pipes=(told,)
            )
    except OSError as error:
        os.close(told)
        return {"status": 127, "said": [], "output": "%s: %s" % (python, error.strerror)}
    listener.join(1.0)
    steps = [int(line[6:]) for line in lines if line.startswith("setup ")]
    said = [line for line in lines if not line.startswith("setup ")]
    found: Json = {"status": status, "said": said, "output": (out + err).strip()[-4000:]}
    if setup and (not steps or steps[-1] <= len(setup)):
        found["failed_setup"] = steps[-1] if steps else 1
    return found


def after_setup(
    setup: list[str],
    told: int,
    python: str,
    feed: bytes,
    environment: dict[str, str],
    workdir: str,
    limit: float,
) -> tuple[int | None, str, str]:
    """`run` through a shell that has run the setup lines, and told of each. Raises OSError."""
    giving, given = os.pipe()  # what the last stage reads, and where it is written
    stream = boot_text('open(%d,"rb")' % giving, isolated=False)
    plan = {"environment": environment, "argv": [python, "-c", stream, LABEL]}
    data = json.dumps(plan).encode() + b"\n" + feed
    threading.Thread(target=pour, args=(given, data), daemon=True).start()
    # Setup lines may hold secrets, and everybody on the host can read a command line.
    everything = {**os.environ, "DTRAIN_SETUP": setup_script(setup, told, giving)}
    command = [find_program("bash") or "/bin/sh", "-c", 'eval "$DTRAIN_SETUP"']
    return run(command, limit, cwd=workdir, environment=everything, pipes=(told, giving))


def pour(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError), os.fdopen(fd, "wb") as file:
        file.write(data)


def hear(fd: int, lines: list[str]) -> None:
    with contextlib.suppress(OSError), os.fdopen(fd, errors="backslashreplace") as file:
        for line in file:
            lines.append(line.rstrip("\n"))


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def setup_script(setup: list[str], told: int, giving: int) -> str:
    """A shell script that runs the setup lines, says how far it came, and becomes `STAGE`."""
    lines = ["unset DTRAIN_SETUP"]
    for step, line in enumerate(setup, 1):
        lines.append("echo setup %d >/proc/self/fd/%d" % (step, told))
        lines.append("eval %s || exit 1" % quoted(line))
    lines.append("echo setup %d >/proc/self/fd/%d" % (len(setup) + 1, told))
    stage = [sys.executable, ISOLATED, "-c", STAGE % giving]
    lines.append("exec " + " ".join(map(quoted, stage)))
    return "\n".join(lines)


def interpreter(request: Json) -> Json:
    """What `dtrain.node.interpreter`, which the launcher sent along, says in the job's Python."""
    asked = request["interpreter"]
    answer = in_job(request, asked, asked["limit"])
    said = answer.pop("said")
    for line in said:
        with contextlib.suppress(ValueError):
            answer.update(json.loads(line))
    if "python" in answer:
        # What setup prints when all is well may be anybody's secret.
        del answer["output"]
    return answer
