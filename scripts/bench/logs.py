"""Measures how fast output is framed, stored and shown, compared with `cat` and `sed`.

    python scripts/bench/logs.py [--lines 1000000] [--streams 8]

Ratios compare with `sed 's/^/[gpu01 0] /'`, one process that only prefixes lines.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.framing import LineFramer, clean_all
from dtrain.runs.events import Finished
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import LogWriter, Stream
from dtrain_cli.views import Filters, make_view

PIECE = 64 << 10
STREAMS, SECONDS = 100, 2000
PLAIN = b"step %d loss 2.3145 lr 3.0e-4 grad_norm 0.81 tokens/s 183422 mem 61.2 GiB\n"
COLORED = (
    b"\x1b[32mstep %d\x1b[0m loss 2.3145 lr 3.0e-4 grad_norm 0.81 tokens/s 183422 \xe2\x9c\x93\n"
)


def pieces(data: bytes) -> list[bytes]:
    return [data[start : start + PIECE] for start in range(0, len(data), PIECE)]


def frame(data: bytes) -> None:
    framer = LineFramer()
    for piece in pieces(data):
        framer.feed(piece)


def frame_and_clean(data: bytes) -> None:
    framer = LineFramer()
    for piece in pieces(data):
        clean_all(framer.feed(piece))


def store(data: bytes, stream: Stream) -> None:
    stream.path.unlink(missing_ok=True)
    writer = LogWriter(stream)
    for piece in pieces(data):
        writer.append(writer.size, piece)


def show(
    streams: list[Stream],
    size: int,
    *,
    json: bool = False,
    fold: bool = False,
    timestamps: bool = False,
    by_arrival: bool = False,
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
        assert reader.stdin is not None
        stdout = os.fdopen(os.dup(reader.stdin.fileno()), "w")
        with stdout, Path(os.devnull).open("w") as stderr:
            view = make_view(
                stdout,
                stderr,
                Filters(),
                lambda: None,
                json=json,
                fold=fold,
                timestamps=timestamps,
                by_arrival=by_arrival,
            )
            for stream in streams:
                view.output(stream, size)
            view.on_event(Finished(Report(ExitCode.OK, "done")))
            view.wait()
        reader.stdin.close()


def store_by_second(streams: list[Stream], seconds: int) -> int:
    """One line of each stream in each second; the size of a stream."""
    size = 0
    for stream in streams:
        clock = itertools.count(1)
        writer = LogWriter(stream, lambda clock=clock: next(clock))
        for second in range(seconds):
            size = writer.append(writer.size, PLAIN % second)
    return size


def run(*command: str) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        subprocess.run(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL, check=True)


def best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--streams", type=int, default=8)
    options = parser.parse_args()
    each = options.lines // options.streams
    lines = each * options.streams
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_HOME"] = folder
        runs = RunFolder.create("bench")
        for title, line in (("plain lines", PLAIN), ("colors and UTF-8", COLORED)):
            one = b"".join(line % number for number in range(each))
            data = one * options.streams
            streams = [
                runs.stream("gpu01", f"worker-{rank}.out", ranked=True)
                for rank in range(options.streams)
            ]
            for stream in streams:
                store(one, stream)
            files = [str(stream.path) for stream in streams]
            whole = runs.stream("gpu01", "worker-999.out", ranked=True)
            reference = best(lambda files=files: run("sed", "s/^/[gpu01 0] /", *files))
            size = len(one)
            print(f"{title}: {lines:,} lines, {len(data) / 1e6:.0f} MB, {options.streams} streams")
            for name, seconds in (
                ("sed, prefixing", reference),
                ("cat", best(lambda files=files: run("cat", *files))),
                ("framing", best(lambda data=data: frame(data))),
                ("framing and cleaning", best(lambda data=data: frame_and_clean(data))),
                ("storing", best(lambda data=data, whole=whole: store(data, whole))),
                ("plain view", best(lambda s=streams, n=size: show(s, n))),
                ("plain view, folded", best(lambda s=streams, n=size: show(s, n, fold=True))),
                ("with timestamps", best(lambda s=streams, n=size: show(s, n, timestamps=True))),
                ("JSON view", best(lambda s=streams, n=size: show(s, n, json=True))),
            ):
                rate = lines / seconds / 1e6
                print(f"  {name:22} {rate:6.2f} M lines/s  {reference / seconds:5.2f}x sed")
            whole.path.unlink()
        streams = [
            runs.stream("gpu02", f"worker-{rank}.out", ranked=True) for rank in range(STREAMS)
        ]
        size = store_by_second(streams, SECONDS)
        lines = STREAMS * SECONDS
        files = [str(stream.path) for stream in streams]
        reference = best(lambda: run("sed", "s/^/[gpu01 0] /", *files))
        print(f"a line each second: {lines:,} lines, {STREAMS} streams")
        for name, by_arrival in (("plain view", False), ("in order of arrival", True)):
            seconds = best(lambda by=by_arrival: show(streams, size, by_arrival=by))
            rate = lines / seconds / 1e6
            print(f"  {name:22} {rate:6.2f} M lines/s  {reference / seconds:5.2f}x sed")


if __name__ == "__main__":
    sys.exit(main())
