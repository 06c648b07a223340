#!/usr/bin/env python3
"""Measures the time of a code sync, compared with other tools, in one run on this machine.

    scripts/bench/sync.py [--files 2000] [--repeat 5]

The folder is a copy of Python's own library, so names, sizes and compressibility are those of code.
Every tool copies it to another folder over pipes: dtrain with its local transport, tar piped into
tar, and rsync (if installed) with a local "remote" shell. Prints medians in seconds, and ratios to
dtrain's (above 1: the other tool is slower).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dtrain.spec.model import Host
from dtrain.sync import scan, send
from dtrain.transport.local import LocalTransport


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as top:
        source = Path(top, "source")
        size = _copy_code(source, options.files)
        print(f"{options.files} files, {size / 2**20:.1f} MiB, median of {options.repeat}")
        first = {name: _median(run, source, options.repeat, warm=0) for name, run in _tools()}
        unchanged = {name: _median(run, source, options.repeat, warm=1) for name, run in _tools()}
    print(f"{'':8}{'first':>10}{'ratio':>8}{'no change':>12}{'ratio':>8}")
    for name in first:
        print(
            f"{name:8}{first[name]:10.3f}{first[name] / first['dtrain']:8.2f}"
            f"{unchanged[name]:12.3f}{unchanged[name] / unchanged['dtrain']:8.2f}"
        )
    if "rsync" not in first:
        print("rsync is not installed here")


def _copy_code(target: Path, files: int) -> int:
    library = Path(sysconfig.get_path("stdlib"))
    size = 0
    found = (path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts)
    for path, _ in zip(found, range(files), strict=False):
        copy = target / path.relative_to(library)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        size += copy.stat().st_size
    return size


Tool = Callable[[Path, Path], None]


def _tools() -> Iterator[tuple[str, Tool]]:
    yield "dtrain", _dtrain
    yield "tar", _tar
    if shutil.which("rsync"):
        yield "rsync", _rsync


def _dtrain(source: Path, target: Path) -> None:
    host = Host(name="here", address="here", transport="local", python=sys.executable)
    connection = LocalTransport().connect(host)
    send(connection, host, scan(source, []), str(target))
    connection.close()


def _tar(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    _pipe(["tar", "-C", str(source), "-cf", "-", "."], ["tar", "-C", str(target), "-xf", "-"])


def _pipe(sender: list[str], receiver: list[str]) -> None:
    with subprocess.Popen(sender, stdout=subprocess.PIPE) as sending:
        subprocess.run(receiver, stdin=sending.stdout, check=True)


def _rsync(source: Path, target: Path) -> None:
    shell = "sh -c 'shift; exec \"$@\"' sh"
    subprocess.run(["rsync", "-a", "-e", shell, f"{source}/", f"here:{target}"], check=True)


def _median(run: Tool, source: Path, repeat: int, warm: int) -> float:
    """Median seconds of the runs after ``warm`` warm-up runs to the same target."""
    seconds = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as top:
            target = Path(top, "target")
            for _ in range(warm):
                run(source, target)
            began = time.perf_counter()
            run(source, target)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
