"""Fuzz targets: files of a run's folder, and cluster files.

Each target is a name, a generator of inputs and a function that takes one. An input is good when
the function returns, or raises an error that a person sees as one: anything else is a defect.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from dtrain.diagnostics import DtrainError
from dtrain.engines.ssh import history
from dtrain.runs.folder import RunFolder
from dtrain.runs.observed import ObservedRun
from dtrain.runs.record import Record
from dtrain.runs.status import status
from dtrain.session.reporting.follow import RunFollower, ending
from dtrain.session.reporting.observer import Observer
from dtrain.spec.load import parse
from dtrain.spec.report import render_problems
from dtrain_cli.views import runs as view
from dtrain_cli.views.paper import Paper
from support.stored import FILE, make_journal, make_record

PIPE = Paper(100, color=False, unicode=False)

Target = tuple[str, Callable[[Random], bytes], Callable[[bytes], None]]

ROOT = Path(__file__).parents[2]
PIECES = [
    *[b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"9" * 400, b"1" * 5000],
    *[b'""', b"[]", b"{}", b"[1]", b'{"a": 1}', b'"\\ud800"', b"[" * 2000, b'{"a":' * 2000],
    *[b"\n", b"\r", b"\0", b"\x80", b"\xff\xfe", b"\x1b[31m", b'"', b",", b":", b"}", b"]", b"\\"],
    *[b'"host"', b'"n1"', b'"s1"', b'"finished"', b'"attempt"', b'"time"', b'"schema"', b'"run"'],
]
YAML_PIECES = [
    *[b"&a ", b"*a", b"<<: *a\n", b"- ", b"? ", b"|\n", b">\n", b"!!int ", b"!x ", b"---\n"],
    *[b"[" * 300, b"{a: " * 300, b"x" * 7000, b"gpu[1-99999]", b"'a[1-16384]'", b".inf"],
    *[b"#", b"%YAML 1.1\n", b"\xef\xbb\xbf", b"\xc2\x85", b"  ", b"\t", b"\\U", b"0x", b"1_000"],
]


def mutated(random: Random, data: bytes, pieces: list[bytes]) -> bytes:
    """``data`` with a few cuts, repetitions, swaps and insertions."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((0, 1, 1, 4, 20, 200)))
        match random.randrange(6):
            case 0:
                data = data[:at] + data[end:]
            case 1:
                data = data[:at] + random.choice(pieces) + data[end:]
            case 2:
                data = data[:at] + random.randbytes(end - at) + data[end:]
            case 3:
                data = data[:end] + data[at:end] * random.choice((1, 3)) + data[end:]
            case 4:
                tokens = _tokens(data)
                if len(tokens) > 1:
                    (start, stop), (first, last) = sorted(random.sample(tokens, 2))
                    data = (
                        b"".join(
                            (data[:start], data[first:last], data[stop:first], data[start:stop])
                        )
                        + data[last:]
                    )
            case _:
                tokens = _tokens(data)
                if tokens:
                    start, stop = random.choice(tokens)
                    data = data[:start] + random.choice(pieces) + data[stop:]
    return data


def _tokens(data: bytes) -> list[tuple[int, int]]:
    """The positions of the values in a text: the parts between separators."""
    found, start = [], 0
    for at, byte in enumerate(data):
        if byte in b" ,:[]{}\n":
            if at > start:
                found.append((start, at))
            start = at + 1
    return found


@cache
def _folder() -> RunFolder:
    path = Path(tempfile.mkdtemp(prefix="dtrain-fuzz-"))
    return RunFolder(path)


def _read(record: bytes, journal: bytes) -> None:
    """Some steps of `dtrain ps`, `logs`, `attach` and `stop` with a run's folder, before they query
    hosts. Each step reads the whole journal, so each input tests only some of them."""
    folder = _folder()
    (folder.path / "run.json").write_bytes(record)
    folder.journal.write_bytes(journal)
    for reader in Random(record + journal).sample(_READERS, 2):
        with contextlib.suppress(DtrainError):
            reader(folder)


def _show(folder: RunFolder) -> None:
    one = status(folder)
    text = view.details(one, PIPE) + view.table([one], PIPE, of=1)
    assert text.replace("\n", "").isprintable()
    text.encode()
    view.as_json([one], of=1)


_READERS: list[Callable[[RunFolder], object]] = [
    _show,
    lambda folder: RunFollower(folder, Record.load(folder.path), Observer()).skip(),
    lambda folder: RunFollower(folder, Record.load(folder.path), Observer()).read_new(),
    ending,
    lambda folder: history.reported(ObservedRun.read(folder).attempt),
    lambda folder: history.received(
        ObservedRun.read(folder).attempt, folder, Record.load(folder.path).plan
    ),
]


def read_record(data: bytes) -> None:
    _read(data, make_journal())


def read_journal(data: bytes) -> None:
    _read(make_record(), data)


def read_cluster_file(data: bytes) -> None:
    try:
        parse(data, "cluster.yaml")
    except DtrainError as error:
        assert render_problems(error).replace("\n", "").isprintable()  # type: ignore[arg-type]


def _cluster_file(random: Random) -> bytes:
    return mutated(random, random.choice(_seeds()), PIECES + YAML_PIECES)


@cache
def _seeds() -> list[bytes]:
    files = [*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "tests" / "spec" / "every_key.yaml"]
    return [FILE.encode(), *(file.read_bytes() for file in files)]


TARGETS: list[Target] = [
    ("record", lambda random: mutated(random, make_record(), PIECES), read_record),
    ("journal", lambda random: mutated(random, make_journal(), PIECES), read_journal),
    ("cluster file", _cluster_file, read_cluster_file),
]
