"""Starts one process for each rank (or task) of a host, and passes on what each says.

Runs in the job's own interpreter, for what `dtrain check` tries out: the rank's program is the one
other module with a ``main`` that was sent along. What a rank reports is the last line that begins
with ``dtrain:``, and JSON; the lines go to the descriptor in DTRAIN_REPORT_FD, in the ranks'
order.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

from dtrain.node.boot import boot_text, framed, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.importer import Importer

MARK = "dtrain:"


def main(stream: BinaryIO, importer: Importer) -> None:
    options = json.loads(stream.readline())
    program = framed(pack("dtrain.node." + options["program"], importer.modules))
    feed = program + json.dumps(options["options"]).encode() + b"\n"
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
    with os.fdopen(int(os.environ["DTRAIN_REPORT_FD"]), "w") as say:
        for rank in ranks:
            output = rank.communicate()[0].decode("utf-8", "replace").strip().splitlines()
            said = [line[len(MARK) :] for line in output if line.startswith(MARK)]
            lost = {"failed": "start", "error": (output or ["status %d" % rank.returncode])[-1]}
            say.write((said[-1] if said else json.dumps(lost)) + "\n")
