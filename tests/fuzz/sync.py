"""Fuzz target: answers of the receiver of a working folder."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from random import Random

from dtrain.diagnostics import NodeError
from dtrain.spec.model import Host
from dtrain.sync import Tree, scan, send
from fuzz.mutation import Target, damaged, mutated
from support.scripted import ScriptedHosts

PREAMBLE = b"\x00dtrain-tree-1\n"


@cache
def _tree() -> Tree:
    folder = Path(tempfile.mkdtemp(prefix="dtrain-fuzz-"))
    for name in ("a", "b", "c"):
        (folder / name).write_text(name)
    return scan(folder, ())


def receiver_output(random: Random) -> bytes:
    replies = [
        {"type": "want", "indices": [0, 2]},
        {"type": "done", "path": "/w.dtrain/1-ab", "new": True, "notices": ["kept x"]},
    ]
    if random.random() < 0.2:
        refused = {"type": "refused", "reason": "no space", "hint": "free some", "changed": 1}
        replies[random.randrange(2)] = refused
    if random.random() < 0.1:
        replies.reverse()
    ends = (b"\n",) * 20 + (b"", b" " * (2 << 20))
    lines = b"".join(mutated(random, one) + random.choice(ends) for one in replies)
    return damaged(random, random.choice((b"", b"Welcome\n")) + PREAMBLE + lines)


def deliver(data: bytes) -> None:
    host = Host("bad", "bad")
    try:
        result = send(ScriptedHosts({"bad": data}, "bad"), host, _tree(), "work")
    except NodeError as error:
        assert error.host == "bad"
        assert len(error.message) < 300_000
    else:
        assert result.sent_files <= 3
        assert result.tree_path.startswith("/")


TARGETS: list[Target] = [("sync", receiver_output, deliver)]
