"""Write numbered lines to stdout and stderr until the file STOP exists.

    numbered.py FOLDER [PAUSE [SIZE]]

All hosts share FOLDER. It contains STOP, and each rank's last complete step.
PAUSE is the seconds between two steps. A step's number determines its output (see `step`), so
that a test can detect lost or repeated bytes in a log. SIZE is the size of the
long lines.
"""

import os
import sys
import time
from pathlib import Path

LONG, SIZE = 50, 64 << 10
"""Interval in lines between long lines, and their size in bytes."""


def step(name: str, rank: int, number: int, size: int = SIZE) -> bytes:
    """A rank's output to stdout (``out``) or stderr (``err``) in one step: a line, sometimes
    a long line, or a line that the next step completes."""
    line = b"%s %d %09d" % (name.encode(), rank, number)
    if number % LONG == 0:
        return line + b" " + b"x" * size + b"\n"
    return line if number % 7 == 0 else line + b"\n"


def write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    folder = Path(sys.argv[1])
    pause = float(sys.argv[2]) if len(sys.argv) > 2 else 0.01
    size = int(sys.argv[3]) if len(sys.argv) > 3 else SIZE
    rank, stop = int(os.environ["RANK"]), folder / "stop"
    note = os.open(folder / f"step-{rank}", os.O_WRONLY | os.O_CREAT)
    number = 0
    while not stop.exists():
        number += 1
        write(1, step("out", rank, number, size))
        write(2, step("err", rank, number, size))
        os.pwrite(note, b"%12d" % number, 0)
        time.sleep(pause)


if __name__ == "__main__":
    main()
