"""A host starts programs that it has kept, and is sent those that it has not."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.launchplan.build import build
from dtrain.node import kept, programs
from dtrain.node.boot import NOT_KEPT, bundle
from dtrain.node.importer import pack_code
from dtrain.node.programs import boot_command, modules
from dtrain.session.facts.conversation import Conversation
from dtrain.spec.load import parse
from dtrain.transport import node_program
from dtrain.transport.local import LocalTransport
from support.node import Node


class Kept:
    """A program that no host has been sent before."""

    def __init__(self, main: str, sources: dict[str, str]) -> None:
        self.main = main
        self.payload = pack_code(sources, {}, 1, {"name": uuid.uuid4().bytes})
        self.file = Path(kept.FOLDER % os.geteuid(), kept.digest_of(self.payload))

    def sent(self) -> bytes:
        return bundle(self.main, self.payload, keep=True)

    def unsent(self) -> bytes:
        return kept.kept(self.main, self.payload)


@pytest.fixture
def program() -> Iterator[Kept]:
    text = "def main(stream, importer): print('ran', stream.read(), sorted(importer.files))"
    names = ("dtrain.node.importer", "dtrain.node.boot", "dtrain.node.kept")
    one = Kept("test", {**{name: modules("facts")[name] for name in names}, "test": text})
    yield one
    one.file.unlink(missing_ok=True)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine, empty."""
    monkeypatch.setattr(kept, "FOLDER", f"{tmp_path}/programs-%d")
    return Path(kept.FOLDER % os.geteuid())


def run(host: Node, program: bytes) -> subprocess.CompletedProcess[bytes]:
    command = ["sh", "-c", boot_command(host.python, "run")]
    return subprocess.run(command, input=program + b"rest", capture_output=True, check=False)


def test_a_host_keeps_a_program(host: Node, program: Kept) -> None:
    missing = run(host, program.unsent())
    assert (missing.stdout, missing.stderr) == (b"", f"{NOT_KEPT}\n".encode())
    for one in (program.sent(), program.unsent()):
        done = run(host, one)
        assert (done.stdout, done.stderr) == (b"ran b'rest' ['name']\n", b"")
    assert len(program.unsent()) < 2000
    assert program.file.stat().st_mode & 0o777 == 0o600
    assert program.file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["changed", "cut", "link", "pipe", "folder"])
def test_a_host_starts_nothing_else(host: Node, program: Kept, kind: str) -> None:
    assert run(host, program.sent()).returncode == 0
    content = program.file.read_bytes()
    program.file.unlink()
    if kind == "link":
        target = host.workdir / "target"
        target.write_bytes(content)
        program.file.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(program.file)
    elif kind == "folder":
        program.file.mkdir()
    else:
        last = bytes([content[-1] ^ 1])
        program.file.write_bytes(content[:-1] + (last if kind == "changed" else b""))
    done = run(host, program.unsent())
    assert (done.stdout, done.stderr) == (b"", f"{NOT_KEPT}\n".encode())
    if kind == "folder":
        program.file.rmdir()


@pytest.mark.parametrize("wrong", ["mode", "link", "file"])
def test_a_folder_that_others_could_change_is_not_used(
    own: Path, tmp_path: Path, wrong: str
) -> None:
    if wrong == "mode":
        own.mkdir()
        own.chmod(0o777)
        (own / "name").write_bytes(b"trap")
    elif wrong == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (tmp_path / "elsewhere" / "name").write_bytes(b"trap")
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.write_bytes(b"")
    kept.keep("other", b"program")
    assert kept.read("name") is None
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("other")]


def test_the_oldest_programs_are_forgotten(own: Path) -> None:
    for number in range(kept.MOST + 1):
        kept.keep(str(number), b"program")
        os.utime(own / str(number), (number, number))
    kept.keep("last", b"program")
    assert {path.name for path in own.iterdir()} == {*map(str, range(2, kept.MOST + 1)), "last"}
    assert kept.read("last") == b"program"


def test_the_launching_machine_packs_a_program_once(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = programs._payload.__wrapped__  # type: ignore[attr-defined]
    first = payload("facts")
    packed = programs._packed
    monkeypatch.setattr(programs, "_packed", None)
    assert payload("facts") == first
    monkeypatch.setattr(programs, "_packed", packed)
    (own / kept.digest_of(first)).write_bytes(first[:1000])  # after a crash
    again = payload("facts")
    assert kept.read(kept.digest_of(again)) == again


def test_a_check_sends_its_program_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Kept("dtrain.node.facts.main", modules("facts"))
    starts = []

    def start(name: str, *, sent: bool) -> bytes:
        starts.append("sent" if sent else "kept")
        return program.sent() if sent else program.unsent()

    monkeypatch.setattr(node_program, "bundled_before", lambda name: start(name, sent=False))
    monkeypatch.setattr(node_program, "bundled", lambda name: start(name, sent=True))
    file = (
        "cluster: {hosts: [here], gpus: 0, transport: local}\njob: {framework: torch, script: a.py}"
    )
    (part,) = build(parse(file, "cluster.yaml"), local_python="python3").hosts
    for expected in (["kept", "sent"], ["kept"]):
        connection = LocalTransport().connect(part.host)
        conversation = Conversation(part, connection)
        conversation.begin(["python3"])
        assert conversation.clock(1.0)[1] > 0
        conversation.close()
        connection.close()
        assert starts == expected
        starts.clear()
    program.file.unlink()
