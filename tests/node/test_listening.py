"""What a host answers that many others dial at once."""

from __future__ import annotations

import errno
import json
import socket
import threading

import pytest

from dtrain.node.facts.ports import BULK, Listener
from support.limits import HANG


class Exhausted:
    """A listening socket of a process that can open no more files for a moment."""

    def __init__(self, peer: socket.socket) -> None:
        self._answers: list[OSError | socket.socket] = [
            OSError(errno.EMFILE, "Too many open files"),
            peer,
            OSError(errno.EBADF, "closed"),
        ]

    def accept(self) -> tuple[socket.socket, None]:
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer, None


@pytest.mark.parametrize("threads", [True, False])
def test_a_host_without_free_files_or_threads_answers_later(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(HANG)
    answers: list[bytes] = []

    def dial() -> None:
        with ours:
            answers.append(ours.makefile("rb").readline())
            ours.sendall(bytes(BULK))
            answers.append(ours.recv(1))

    dialing = threading.Thread(target=dial)
    dialing.start()
    if not threads:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
    Listener("gpu01", "token")._serve(Exhausted(theirs))  # type: ignore[arg-type]
    dialing.join()
    assert json.loads(answers[0]) == ["token", "gpu01"]
    assert answers[1] == b"."
