"""The lines of an answer without an end, of a server that writes it in any pieces."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from dtrain.diagnostics import ConnectError
from dtrain.engines.kubernetes import line_stream
from dtrain.engines.kubernetes.line_stream import LineStream, QuietError
from dtrain.engines.kubernetes.routines import Routine, Routines, finish
from support.kubernetes.access import Access
from support.limits import HANG

CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def served(
    head_and_body: bytes, piece: int, *, ends: bool = True, tls: Access | None = None
) -> tuple[LineStream, object]:
    """The stream of an answer that arrives in pieces of this size, and the server's connection."""
    server = socket.create_server(("127.0.0.1", 0))
    context = tls.server_context() if tls is not None else None
    opened: list[socket.socket] = []

    def answer() -> None:
        connection, _ = server.accept()
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        opened.append(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(1 << 16)
        data = b"HTTP/1.1 200 OK\r\n" + head_and_body
        for start in range(0, len(data), piece):
            connection.sendall(data[start : start + piece])
        if ends:
            connection.close()
        server.close()

    threading.Thread(target=answer, daemon=True).start()
    secure = {"ca_certs": str(tls.folder / "ca.pem")} if tls is not None else {}
    url = f"http{'s' if secure else ''}://127.0.0.1:{server.getsockname()[1]}/"
    found = urllib3.PoolManager(**secure).request("GET", url, preload_content=False, retries=False)
    return LineStream("server", "GET log", found), opened


def lines_of(stream: LineStream) -> Iterator[bytes]:
    while lines := finish(stream.read()):
        yield from lines
    stream.close()


@pytest.mark.parametrize("piece", [1, 3, 1 << 16])
@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"1\r\na\r\n0003;x=y\r\nb\nc\r\n5\r\nd\n\n\r\n\r\n0\r\n\r\n",
        b"Content-Length: 9\r\n\r\nab\ncd\n\n\r\n",
        b"Connection: close\r\n\r\nab\ncd\n\n\r\n",
    ],
)
def test_a_body_in_any_pieces(answer: bytes, piece: int) -> None:
    assert [*lines_of(served(answer, piece)[0])] == [b"ab\n", b"cd\n", b"\n", b"\r\n"]


@pytest.mark.parametrize("answer", [CHUNKED + b"0\r\n\r\n", b"Content-Length: 0\r\n\r\n"])
def test_a_stream_without_lines(answer: bytes) -> None:
    assert [*lines_of(served(answer, 100)[0])] == []


@pytest.mark.parametrize(
    "answer", [CHUNKED + b"9\r\nab\ncd", CHUNKED + b"2\r\na\n\r\n", b"Content-Length: 9\r\n\r\na\n"]
)
def test_a_connection_that_ends_within_a_body_is_broken(answer: bytes) -> None:
    lines = lines_of(served(answer, 100)[0])
    assert next(lines)
    with pytest.raises(ConnectError, match="the connection has ended"):
        next(lines)


@pytest.mark.parametrize("size", [b"what", b"-5", b"1_0", b"f" * 20])
def test_what_is_no_chunk(size: bytes) -> None:
    with pytest.raises(ConnectError, match="no size of a chunk"):
        next(lines_of(served(CHUNKED + size + b"\r\nabc\n\r\n", 100)[0]))


@pytest.mark.parametrize("length", [b"what", b"-5"])
def test_what_is_no_length_does_not_count(length: bytes) -> None:
    answer = b"Content-Length: " + length + b"\r\n\r\na\nb\n"
    assert [*lines_of(served(answer, 100)[0])] == [b"a\n", b"b\n"]


def test_what_tls_has_decrypted_already_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record may have more than the reader of the headers takes, and nothing after it."""
    monkeypatch.setattr(line_stream, "QUIET_SECONDS", 0.2)
    line = b"x" * 999 + b"\n"
    body = CHUNKED + b"3a98\r\n" + 15 * line + b"\r\n"
    stream, kept = served(body, 1 << 16, ends=False, tls=Access(tmp_path))
    lines = lines_of(stream)
    assert [next(lines) for _ in range(15)] == 15 * [line]
    assert kept


def test_one_thread_reads_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet one, and one that always has more, keep none waiting."""
    monkeypatch.setattr(line_stream, "QUIET_SECONDS", 0.2)
    large = CHUNKED + b"".join([b"ffff\r\n" + b"x" * 0xFFFE + b"\n\r\n"] * 200) + b"0\r\n\r\n"
    ends: queue.SimpleQueue[tuple[str, int | Exception]] = queue.SimpleQueue()
    routines = Routines("test")

    def read(name: str, stream: LineStream) -> Routine[None]:
        count = 0
        try:
            while lines := (yield from stream.read()):
                count += len(lines)
        except ConnectError as error:
            ends.put((name, error))
        else:
            ends.put((name, count))

    quiet, kept = served(CHUNKED, 100, ends=False)
    routines.start(read("quiet", quiet))
    for number in range(3):
        routines.start(read(f"large {number}", served(large, len(large))[0]))
    found = dict(ends.get(timeout=HANG) for _ in range(4))
    routines.stop()
    assert isinstance(found.pop("quiet"), QuietError)
    assert set(found.values()) == {200}
    assert kept
