"""Starts one process for each rank (or task) of a host, and passes on what each says.

Sent to hosts as text, and run there by the job's own interpreter, for what `dtrain check` tries
out: `rehearsal.py`, `rehearsal_tensorflow.py` and `bandwidth.py` are such ranks. What a rank has
to say is the last line that begins with ``dtrain:``, and JSON; the lines go to the descriptor that
DTRAIN_SAY names, in the ranks' order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

MARK = "dtrain:"


def main() -> None:
    options = json.loads(sys.argv[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", options["source"], json.dumps(options["options"])],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for environment in options["ranks"]
    ]
    with os.fdopen(int(os.environ["DTRAIN_SAY"]), "w") as say:
        for process in ranks:
            output = process.communicate()[0].decode("utf-8", "replace").strip().splitlines()
            said = [line[len(MARK) :] for line in output if line.startswith(MARK)]
            lost = {"failed": "start", "error": (output or ["status %d" % process.returncode])[-1]}
            say.write((said[-1] if said else json.dumps(lost)) + "\n")


main()
