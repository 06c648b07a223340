"""No text from a worker, a host or a file costs more than linear time.

Each path gets n and 4n bytes of each kind of hostile text. Four times the text may take eight times
the CPU time at most; work that takes no time at all passes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from rich.text import Text

from dtrain.diagnostics import ExitCode, NodeError
from dtrain.failures.alike import messages
from dtrain.failures.catalogue import End, explain, signatures
from dtrain.failures.cause import Failure, Report
from dtrain.failures.kernel import understand
from dtrain.failures.stacks import stack
from dtrain.failures.traceback import last_words, shorten
from dtrain.framing import LineFramer, clean
from dtrain.hostlist import HostListError, fold, unfold
from dtrain.messages.decode import parse as parse_json
from dtrain.node.agent.events import EventReader
from dtrain.node.agent.evidence import FAILURE
from dtrain.node.agent.kernel_log import ENTRY, RECORD, TROUBLE
from dtrain.node.agent.progress import ProgressFiles
from dtrain.node.agent.wire import HEADER, MESSAGE, PREAMBLE
from dtrain.node.protocol import FrameDecoder, ProtocolError
from dtrain.screen import ScreenFramer
from dtrain.spec.load import parse
from dtrain.spec.report import SpecError
from dtrain.transport.incoming import Incoming
from dtrain_cli.views import names
from dtrain_cli.views.board import Board
from dtrain_cli.views.dashboard import draw
from dtrain_cli.views.folding import LineFolder
from dtrain_cli.views.report import render
from support.scripted import ScriptedProcess

pytestmark = pytest.mark.slow

N = 32 << 10
NOTHING = 0.03
"""Seconds of CPU time that need no comparison: quadratic work on 4 N bytes takes longer."""
PIECE = 16
SAMPLES = yaml.safe_load((Path(__file__).parent / "failures/samples.yaml").read_text("utf-8"))

PAST = HEADER.pack(MESSAGE, 0, 0, 15) + b'{"type":"past"}'
KINDS: dict[str, str | tuple[str, str]] = {  # what is repeated, perhaps after a beginning
    "U+0090": "\x90",
    "U+009F": "\x9f",
    "U+009B": "\x9b",
    "U+009B with digits": "\x9b1",
    "OSC": "\x1b]",
    "OSC of U+009D": "\x9d0;",
    "CSI": "\x1b[",
    "SGR": "\x1b[31m",
    "CSI parameters": "0;",
    "carriage returns": "\r",
    "redrawn": "a\r",
    "cursor up": "\x1b[A",
    "cursor far up": "a\n\x1b[999A",
    "nested bars": "a\n\rb\x1b[A\r",
    "long lines, nested": ("x" * 16000 + "\n\x1b[15A", "\n\x1b[A"),
    "long line, redrawn": "x" * 2000 + "\r" + "a\r" * 1000,
    "empty lines": "\n",
    "short lines": "a\n",
    "zeros": "\0",
    "spaces": " ",
    "digits": "1",
    "letters": "x",
    "opening brackets": "[",
    "opening brackets and quotes": '["',
    "empty lists": ("[", "[],"),
    "opening parentheses": " (",
    "brackets": "[0-1]",
    "braces": '{"a":',
    "quotes": '"',
    "escaped quotes": ('"', '\\"'),
    "backslashes": "\\",
    "fraction": ("0.", "1"),
    "colons": "a: ",
    "commas": "a,",
    "wide": "█",
    "surrogates": "\ud800",
    "native frames": "frame #1: \n",
    "tracebacks": "Traceback (most recent call last):\n",
    "tracebacks, chained": (
        "Traceback (most recent call last):\n  File\nE\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
    ),
    "prefixed": "[rank1]: Traceback (most recent call last):\n[rank1]:\n",
    "log prefix": "E0101 00:00:00.0 1 ",
    "log prefix, then lines": "E0101 00:00:00.0 1 " + "x" * 4000 + "] Traceback (most recent call"
    " last):\n" + "E0101\n" * 600,
    "fatal errors": "Fatal Python error: \n",
    "threads": "Thread 0x",
    "hexadecimal": ("Thread 0x", "a"),
    "frames": '  File "a", line 1 in b\n',
    "py-spy frames": "    a (",
    "py-spy lines": "    a (b:1:1:1",
    "torchrun": "rank: 1 (local_rank: ",
    "torchrun, spaced": ("rank", " "),
    "torchrun, exit code": "rank : 1 (local_rank: 1)" + " " * 2000 + "exitcode ",
    "kernel": "XFS (",
    "kernel, Xid": "NVRM: Xid (PCI:0000",
    "journal": "1.1 a kernel: ",
    "almost a preamble": PREAMBLE[:-1].decode(),
    "frames of a relay": (PREAMBLE.decode(), PAST.decode()),
}


def aimed() -> Iterator[tuple[str, str]]:
    """Text that each expression of the catalogue almost finds."""
    output = [sample["said"] for samples in SAMPLES.values() for sample in samples]
    for known in signatures():
        if known.details is not None:
            found = next(filter(None, map(known.details.search, output)))[0]
            yield f"{known.id}, cut", found[:-1]
            yield f"{known.id}, half", found[: len(found) // 2]
            yield f"{known.id}, digits", re.sub(r"\d+", "1" * 500, found[:-1])


def in_pieces(data: bytes, feed: Callable[[bytes], object]) -> None:
    for at in range(0, len(data), PIECE):
        feed(data[at : at + PIECE])


def framed(text: str) -> None:
    framer = LineFramer()
    framer.feed(text.encode(errors="replace"))
    assert framer.partial is not None
    framer.flush()


def screened(text: str) -> None:
    framer = ScreenFramer()
    framer.feed(b"\x1b[9A")
    in_pieces(text.encode(errors="replace"), framer.feed)
    assert framer.partial is not None
    framer.flush()


def after_noise(text: str) -> None:
    with contextlib.suppress(ProtocolError, EOFError):
        Incoming(ScriptedProcess(text.encode(errors="replace"))).preamble(PREAMBLE)


def line_by_line(text: str) -> None:
    incoming = Incoming(ScriptedProcess(text.encode(errors="replace")))
    with contextlib.suppress(ProtocolError, EOFError):
        while True:
            incoming.until(b"\n", 1 << 16)


def read_as_json(text: str) -> None:
    with contextlib.suppress(ProtocolError):
        parse_json(text.encode(errors="replace"))


def decoded(text: str) -> None:
    decoder = FrameDecoder()
    in_pieces(text.encode(errors="replace"), lambda data: list(decoder.feed(data)))


def decoded_after_preamble(text: str) -> None:
    decoder = FrameDecoder()
    list(decoder.feed(PREAMBLE))
    with contextlib.suppress(ProtocolError):
        in_pieces(text.encode(errors="replace"), lambda data: list(decoder.feed(data)))


def detailed(text: str) -> None:
    for known in signatures():
        if known.details is not None:
            known.details.search(text)


def unfolded(text: str) -> None:
    with contextlib.suppress(HostListError):
        unfold(text)


def loaded(text: str) -> None:
    with contextlib.suppress(SpecError):
        parse(text.encode(errors="replace"), "cluster.yaml")


def folded(text: str) -> None:
    folder: LineFolder[int] = LineFolder()
    for rank, line in enumerate(text.splitlines()):
        folder.add(0.0, rank % 8, "stdout", f"{line}\n")
    for each in folder.take():
        names.labels(map(str, each.sources))


def partly_folded(text: str) -> None:
    """One rank writes more lines than the others, which also write theirs to stderr."""
    folder: LineFolder[int] = LineFolder()
    lines = [f"{line}\n" for line in text.splitlines()]
    folder.add(0.0, 0, "stdout", "".join(f"{n}\n{line}" for n, line in enumerate(lines)))
    folder.add(0.0, 1, "stdout", "".join(lines))
    folder.add(0.0, 2, "stdout", "".join(f"{n}\n" for n in range(len(lines))))
    for line in lines[:100]:
        folder.add(0.0, 3, "stderr", line)
    folder.take()


def problems(text: str) -> None:
    messages([NodeError("gpu01", "reading", text, hint=text)] * 4, [])


def reported(text: str) -> None:
    failures = tuple(
        Failure(f"gpu{rank}", "worker", rank, rank, 0.0, 1, message=text, traceback=text)
        for rank in range(3)
    )
    report = Report(ExitCode.JOB_FAILED, "failed", failures, (text,), text)
    render(report, {}, color=True)


def progress_read(text: str) -> None:
    with written(text, "rank-0.progress") as path:
        files = ProgressFiles(os.fsencode(path.parent), {}, attached=False)
        for _ in range(4):
            list(files.read())


def events_read(text: str) -> None:
    with written(text, "events") as path:
        list(EventReader(os.fsencode(path)).all())


@contextlib.contextmanager
def written(text: str, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, errors="replace")
        yield path


PATHS: dict[str, Callable[[str], object]] = {
    "clean": clean,
    "clean, in color": lambda text: clean(text, color=True),
    "lines": framed,
    "lines from small pieces": lambda text: in_pieces(
        text.encode(errors="replace"), LineFramer().feed
    ),
    "redrawn lines": lambda text: ScreenFramer().feed(text.encode(errors="replace")),
    "redrawn lines from small pieces": screened,
    "last words": lambda text: last_words(text.encode(errors="replace")),
    "last words, uncaught": lambda text: shorten(
        last_words(text.encode(errors="replace"), uncaught=True)
    ),
    "signatures": lambda text: explain(End(code=1, output=text)),
    "signatures' details": detailed,
    "kernel messages": lambda text: understand([(0.0, text)], ["0000:3b:00.0"], [0]),
    "stacks": stack,
    "json": read_as_json,
    "noise before a preamble": after_noise,
    "lines of a program": line_by_line,
    "frames": decoded,
    "frames after the preamble": decoded_after_preamble,
    "torchrun's summary": lambda text: re.findall(FAILURE, text.encode(errors="replace")),
    "kernel log": lambda text: [
        (re.search(TROUBLE, line[:500]), re.match(RECORD, line), re.match(ENTRY, line))
        for line in text.encode(errors="replace").splitlines()
    ],
    "progress files": progress_read,
    "events": events_read,
    "host list": unfolded,
    "host names": lambda text: fold(text.split()),
    "cluster file": loaded,
    "folded lines": folded,
    "partly folded lines": partly_folded,
    "dashboard": lambda text: draw(Board("run", 0.0, 1), [Text(clean(text))], 80, 24, 0.0),
    "problems": problems,
    "report": reported,
}
SLOW = (
    "cluster file",
    "dashboard",
    "events",
    "folded lines",
    "host names",
    "kernel log",
    "partly folded lines",
    "problems",
    "progress files",
    "redrawn lines",
    "redrawn lines from small pieces",
    "report",
)
AIMED_AT = ("signatures", "signatures' details", "last words")


def cost(path: Callable[[str], object], text: str) -> float:
    # Collections cost what all objects of the test process cost, not what this text does.
    gc.disable()
    try:
        begun = time.process_time()
        path(text)
        return time.process_time() - begun
    finally:
        gc.enable()


@pytest.mark.parametrize("name", PATHS)
def test_four_times_the_text_takes_no_more_than_eight_times_as_long(name: str) -> None:
    path = PATHS[name]
    path("warm up")
    for kind, unit in (KINDS | dict(aimed() if name in AIMED_AT else ())).items():
        head, unit = ("", unit) if isinstance(unit, str) else unit
        n = max(N // 8 if name in SLOW else N, len(unit))
        short, long = (head + (unit * (size // len(unit) + 1))[:size] for size in (n, 4 * n))
        for _ in range(3):
            after = cost(path, long)
            if after < NOTHING:
                break
            before = cost(path, short)
            if after < 8 * before:
                break
        else:
            pytest.fail(f"{kind}: {before:.3f} s for n bytes, {after:.3f} s for 4 n")
