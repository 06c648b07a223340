"""Hosts dial each other: what a host answers, and what it reports about the others."""

from __future__ import annotations

import errno
import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from dtrain.node.agent.ports import reserve_port, share_ports
from dtrain.node.facts.dialing import AT_ONCE, dial, dial_one
from dtrain.node.facts.ports import MAX_LINE, Listener
from dtrain.node.facts.socket_loop import READABLE, SocketLoop, receive
from support.limits import HANG
from support.ports import free_port, loopbacks

if TYPE_CHECKING:
    from dtrain.node.facts.socket_loop import Steps

HERE = "127.0.0.1"
SOON = 1.0
"""Seconds to wait for a program that never answers."""


@pytest.fixture
def loop() -> Iterator[SocketLoop]:
    one = SocketLoop()
    yield one
    one.close()


def answers(
    loop: SocketLoop, *places: tuple[str, int], limit: float = HANG
) -> dict[tuple[str, int], dict[str, Any]]:
    """The answers by address and port, if gpu01 is expected at each."""
    targets = [("gpu01", "address", address, port, None) for address, port in places]
    found = dial({"op": "dial", "targets": targets, "token": "token", "limit": limit}, loop)
    return {
        (one.pop("address"), one.pop("port")): one
        for one in found
        if (one.pop("host"), one.pop("kind")) == ("gpu01", "address")
    }


def answer(loop: SocketLoop, port: int, limit: float = HANG) -> dict[str, Any]:
    return answers(loop, (HERE, port), limit=limit)[HERE, port]


def another_program(loop: SocketLoop, says: bytes) -> int:
    """The port of a program that sends ``says`` to its first client, and reads nothing."""
    listening = socket.create_server((HERE, 0))

    def run() -> Steps[None]:
        with listening:
            yield listening, READABLE, float("inf")
            with listening.accept()[0] as peer:
                peer.sendall(says)
                yield listening, READABLE, float("inf")

    loop.start(run())
    return int(listening.getsockname()[1])


def test_many_hosts_are_dialed_and_answer(loop: SocketLoop) -> None:
    # One socket listens on all of these addresses: a process may open few files.
    addresses = [f"127.1.{host // 200}.{host % 200}" for host in range(2 * AT_ONCE)] + loopbacks()
    port = Listener("gpu01", "token", loop).open(0)
    found = answers(loop, *((address, port) for address in addresses))
    assert found.keys() == {(address, port) for address in addresses}
    for one in found.values():
        assert one["mss"] > 500
        assert "error" not in one


@pytest.mark.parametrize(
    ("host", "token", "answered"),
    [("gpu02", "token", "gpu02"), ("gpu01", "of another check", "")],
)
def test_another_host_answers(loop: SocketLoop, host: str, token: str, answered: str) -> None:
    port = Listener(host, token, loop).open(0)
    assert answer(loop, port) == {"error": "wrong", "answered": answered}


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6\r\n", b"x" * 5000, b"[1]\n", b'{"a": 1}\n'])
def test_another_program_answers(loop: SocketLoop, says: bytes) -> None:
    port = another_program(loop, says)
    assert answer(loop, port) == {"error": "wrong", "answered": ""}


def test_a_program_that_says_nothing(loop: SocketLoop) -> None:
    assert answer(loop, another_program(loop, b""), SOON) == {"error": "timed out"}


def test_large_packets_that_do_not_arrive(loop: SocketLoop) -> None:
    port = another_program(loop, b'["token", "gpu01"]\n')
    found = answer(loop, port, SOON)
    assert found["error"] == "stalled"
    assert found["mss"] > 500


def test_a_packet_of_full_size_is_sent(loop: SocketLoop) -> None:
    sent: list[bytes] = []
    with socket.create_server((HERE, 0)) as listening, ThreadPoolExecutor() as pool:

        def take() -> None:
            with listening.accept()[0] as peer, peer.makefile("rb") as stream:
                peer.sendall(b'["token", "gpu01"]\n')
                sent.append(stream.readline())
                peer.sendall(b".")

        taking = pool.submit(take)
        found = answer(loop, listening.getsockname()[1])
        taking.result()
    assert found == {"mss": len(sent[0]) - 1}


def test_a_program_that_sends_nothing_is_waited_for_once() -> None:
    with socket.create_server((HERE, 0)) as silent:
        port = silent.getsockname()[1]
        target = ("gpu01", "job", HERE, port, None)
        steps = dial_one(target, [(socket.AF_INET, (HERE, port))], "token", HANG)
        next(steps)
        silent.accept()[0].close()  # both sides are connected now
        with pytest.raises(StopIteration) as ended:
            steps.throw(TimeoutError("timed out"))
    assert ended.value.value == {"error": "timed out"}


def test_a_peer_that_never_ends_its_line(loop: SocketLoop) -> None:
    port = Listener("gpu01", "token", loop).open(0)
    with socket.create_connection((HERE, port), HANG) as peer:
        peer.sendall(bytes(MAX_LINE))
        assert peer.makefile("rb").read() == b'["token", "gpu01"]\n'


def test_a_host_that_does_not_answer(loop: SocketLoop) -> None:
    with socket.create_server((HERE, 0), backlog=0) as full:
        port = full.getsockname()[1]
        with socket.create_connection((HERE, port)):
            assert answer(loop, port, SOON) == {"error": "no answer within 1 s"}


def test_places_that_cannot_be_dialed(loop: SocketLoop) -> None:
    closed = free_port()
    found = answers(loop, (HERE, closed), ("ä..b", 1))
    assert found[HERE, closed] == {"error": "connection refused"}
    assert "label" in found["ä..b", 1]["error"]


class Exhausted:
    """A listening socket of a process that can open no more files for a moment."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._errors: list[OSError] = [
            OSError(errno.EMFILE, "Too many open files"),
            ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort"),
        ]

    def accept(self) -> tuple[socket.socket, object]:
        if self._errors:
            raise self._errors.pop()
        return self._sock.accept()

    def fileno(self) -> int:
        return self._sock.fileno()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._sock.close()


def test_a_host_without_free_files_answers_later(loop: SocketLoop) -> None:
    sock = socket.create_server((HERE, 0))
    sock.setblocking(False)
    listener = Listener("gpu01", "token", loop)
    loop.start(listener._serve(Exhausted(sock)))  # type: ignore[arg-type]
    assert "error" not in answer(loop, sock.getsockname()[1])


DIAL = """
import json, resource, sys
from dtrain.node.facts.dialing import dial
from dtrain.node.facts.socket_loop import SocketLoop
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
order = json.loads(sys.argv[1])
print(json.dumps(dial(order, SocketLoop())))
"""


def test_a_check_leaves_a_port_alone_on_which_a_job_will_listen(loop: SocketLoop) -> None:
    port = free_port()
    held = reserve_port(port)
    share_ports(held)
    try:
        with pytest.raises(OSError, match="in use"):
            Listener("gpu01", "token", loop).open(port)
        socket.create_server((HERE, port)).close()  # as rank 0 of the job
    finally:
        for sock in held:
            sock.close()


def test_a_job_can_listen_after_a_check_that_closed_its_connections_first() -> None:
    port, checking = free_port(), SocketLoop()
    Listener("gpu01", "token", checking).open(port)
    with socket.create_connection((HERE, port)) as peer:
        peer.recv(100)
        checking.close()  # as the end of an interrupted check
        assert peer.recv(100) == b""
    for sock in reserve_port(port):
        sock.close()


def test_a_host_with_few_free_files_dials_all_others(loop: SocketLoop) -> None:
    port = Listener("gpu01", "token", loop).open(0)
    targets = [("gpu01", "address", HERE, port, None)] * 200
    order = json.dumps({"op": "dial", "targets": targets, "token": "token", "limit": HANG})
    done = subprocess.run([sys.executable, "-c", DIAL, order], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 200
    assert not [one for one in found if "error" in one]


def test_a_host_that_can_watch_no_more_sockets_says_so(loop: SocketLoop) -> None:
    class Full:
        def __init__(self, poll: select.epoll) -> None:
            self._poll = poll

        def __getattr__(self, name: str) -> Any:
            return getattr(self._poll, name)

        def register(self, *_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with socket.create_server(("", 0)) as listening:
        loop._poll = Full(loop._poll)  # type: ignore[assignment]
        found = answers(
            loop, *((f"127.0.1.{host}", listening.getsockname()[1]) for host in range(200))
        )
        served = Listener("gpu01", "token", loop).open(0)
        loop.close()
    assert len(found) == 200
    assert {one["error"] for one in found.values()} == {"no space left on device"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, served), HANG)


def test_what_arrived_while_the_process_stood_still_is_in_time(loop: SocketLoop) -> None:
    ours, theirs = socket.socketpair()
    arrived: list[bytes] = []
    over = threading.Event()

    def wait() -> Steps[None]:
        with ours:
            arrived.append((yield from receive(ours, 1, time.monotonic() + SOON)))
            over.set()

    def stand_still() -> Steps[None]:
        time.sleep(2 * SOON)
        theirs.send(b".")
        yield from ()

    loop.start(wait())
    loop.start(stand_still())
    with theirs:
        assert over.wait(HANG)
    assert arrived == [b"."]


def test_a_conversation_that_has_not_begun_is_ended(loop: SocketLoop) -> None:
    ours, theirs = socket.socketpair()
    begun, go = threading.Event(), threading.Event()

    def hold() -> Steps[None]:
        begun.set()
        go.wait(HANG)
        yield from ()

    loop.start(hold())
    begun.wait(HANG)
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(loop.close)
        while not loop._new:
            time.sleep(0.01)
        loop.start(Listener("gpu01", "token", loop)._answer(theirs))
        go.set()
        closing.result()
    with ours:
        ours.settimeout(HANG)
        assert ours.makefile("rb").readline() == b'["token", "gpu01"]\n'
        assert ours.recv(1) == b""


def test_the_end_of_the_check_frees_the_ports_and_ends_all_connections(loop: SocketLoop) -> None:
    port = Listener("gpu01", "token", loop).open(0)
    with socket.create_connection((HERE, port), HANG) as peer:
        greeting = peer.makefile("rb").readline()
        loop.close()
        assert greeting == b'["token", "gpu01"]\n'
        assert peer.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port))
    loop.close()
