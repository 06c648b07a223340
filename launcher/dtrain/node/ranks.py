"""Starts one process for each rank (or task) of a host, and forwards their reports.

Runs in the job's own interpreter, for the rehearsals of `dtrain check`. The rank's program is
another module with a ``main`` that was sent along. A rank's report is its last line of output that
begins with `MARK`, followed by JSON. The reports go to the descriptor in DTRAIN_REPORT_FD, in the
order of the ranks.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import subprocess
import sys

from dtrain.node.boot import boot_text, framed, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, NoReturn

    from dtrain.node.importer import Importer

MARK = "dtrain:"


def first_line(failure: BaseException) -> str:
    """What failed, in one line for a report."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(failure).__name__


def finish(report: dict[str, Any]) -> NoReturn:
    """Write a rank's report and end its process. Servers of TensorFlow end in no other way, and the
    destructor of a failed process group of torch may hang."""
    print("\n" + MARK + json.dumps(report), flush=True)
    os._exit(0)


def main(stream: BinaryIO, importer: Importer) -> None:
    options = marshal.load(stream)
    program = framed(pack("dtrain.node." + options["program"], importer.modules))
    feed = program + marshal.dumps(options["options"])
    command = [sys.executable, "-c", boot_text(isolated=False), "dtrain-rank"]
    ranks = []
    for environment in options["ranks"]:
        rank = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert rank.stdin is not None
        with rank.stdin as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(feed)
        ranks.append(rank)
    with os.fdopen(int(os.environ["DTRAIN_REPORT_FD"]), "w") as reports:
        for rank in ranks:
            assert rank.stdout is not None
            with rank.stdout as stdout:
                output = stdout.read().decode("utf-8", "replace").strip().splitlines()
            rank.wait()
            found = [line[len(MARK) :] for line in output if line.startswith(MARK)]
            lost = {"failed": "start", "error": (output or ["status %d" % rank.returncode])[-1]}
            reports.write((found[-1] if found else json.dumps(lost)) + "\n")
