"""The transport contract, tested on every transport."""

from __future__ import annotations

import base64
import hashlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.contract import Connection, RemoteProcess
from dtrain.transport.local import LocalTransport
from dtrain.transport.ssh import SshTransport
from support.limits import HANG
from support.ports import free_port
from support.ssh_server import SshServer
from support.sshd import Sshd, generate_key


@pytest.fixture(params=["local", "in-process server", pytest.param("sshd", marks=pytest.mark.sshd)])
def connection(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make_transport: Callable[..., SshTransport],
) -> Iterator[Connection]:
    if request.param == "local":
        made: Connection = LocalTransport().connect(Host("here", "127.0.0.1", transport="local"))
        yield made
        made.close()
    elif request.param == "sshd":
        sshd: Sshd = request.getfixturevalue("sshd")
        ssh = Ssh(sshd.user, sshd.port, str(sshd.identity), known_hosts=str(sshd.known_hosts))
        made = make_transport().connect(Host("gpu01", sshd.address, ssh=ssh))
        yield made
        made.close()
    else:
        identity = generate_key(tmp_path / "identity")
        public = base64.b64decode(Path(f"{identity}.pub").read_text().split()[1])
        with SshServer(public) as server:
            (tmp_path / "known_hosts").write_text(server.host_key_line)
            ssh = Ssh("someone", server.port, str(identity), known_hosts="known_hosts")
            made = make_transport().connect(Host("gpu01", "127.0.0.1", ssh=ssh))
            yield made
            made.close()


def read_all(process: RemoteProcess) -> bytes:
    pieces = []
    while piece := process.read():
        pieces.append(piece)
    return b"".join(pieces)


def run(connection: Connection, command: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    process = connection.start(command)
    process.write(stdin)
    process.close_stdin()
    output = read_all(process)
    status = process.wait(HANG)
    process.close()
    return status, output, process.stderr()


def test_stdout_stderr_and_status_are_separate(connection: Connection) -> None:
    assert run(connection, "echo out; echo err >&2; exit 3") == (3, b"out\n", b"err\n")


def test_every_byte_value_passes_in_both_directions(connection: Connection) -> None:
    everything = bytes(range(256)) * 10
    assert run(connection, "tee /dev/stderr", everything) == (0, everything, everything)


def test_ten_megabytes_pass_in_both_directions_at_once(connection: Connection) -> None:
    data = os.urandom(10 << 20)
    process = connection.start("cat")
    writer = threading.Thread(target=lambda: (process.write(data), process.close_stdin()))
    writer.start()
    output = read_all(process)
    writer.join(HANG)
    assert hashlib.sha256(output).digest() == hashlib.sha256(data).digest()
    assert process.wait(HANG) == 0


def test_dial_connects_to_a_port_of_the_host(connection: Connection) -> None:
    port = free_port()  # the system gives it to no connection once it is closed
    listener = socket.create_server(("127.0.0.1", port))
    stream = connection.dial(port, HANG)
    peer, _ = listener.accept()
    stream.sendall(b"ask")
    assert peer.recv(10) == b"ask"
    stream.shutdown(socket.SHUT_WR)
    assert peer.recv(10) == b""
    peer.sendall(b"answer")
    peer.close()
    assert stream.recv(10) == b"answer"
    assert stream.recv(10) == b""
    stream.close()
    listener.close()
    with pytest.raises(ConnectError, match=f"port {port}"):
        connection.dial(port, HANG)


def test_stdin_stays_open_until_closed(connection: Connection) -> None:
    process = connection.start("read -r first; echo got $first; read -r second; echo got $second")
    process.write(b"one\n")
    assert process.read() == b"got one\n"
    process.write(b"two\n")
    assert read_all(process) == b"got two\n"


def test_read_returns_at_most_the_requested_size(connection: Connection) -> None:
    process = connection.start("printf 0123456789")
    pieces = []
    while piece := process.read(3):
        pieces.append(piece)
    assert b"".join(pieces) == b"0123456789"
    assert max(map(len, pieces)) <= 3
    assert process.read() == b""


def test_exit_status(connection: Connection) -> None:
    for status in (0, 1, 86, 126, 255):
        assert connection.start(f"exit {status}").wait(HANG) == status


def test_a_signal_is_a_negative_status(connection: Connection) -> None:
    # SIGHUP is 1, and paramiko's value for "no status" is -1.
    for name, number in (("TERM", 15), ("KILL", 9), ("HUP", 1), ("SEGV", 11)):
        process = connection.start(f"ulimit -c 0; kill -{name} $$")
        assert process.wait(HANG) == -number


def test_a_command_that_does_not_exist_is_status_127(connection: Connection) -> None:
    status, _, stderr = run(connection, "dtrain-no-such-command")
    assert status == 127
    assert b"dtrain-no-such-command" in stderr


HOSTILE = [
    "with space",
    "quo'te",
    'dou"ble',
    "new\nline",
    "$(touch /tmp/dtrain-was-here)",
    "; echo no",
    "`id`",
    "*",
    "-n",
    "\\",
    "ünï©ode",
    "bytes \udcff\udcfe that are no text",
]


def test_hostile_arguments_arrive_unchanged(connection: Connection) -> None:
    for word in HOSTILE:
        status, output, _ = run(connection, f"printf %s {quote(word)}")
        assert (status, output) == (0, word.encode("utf-8", "surrogateescape"))


def test_a_flood_on_stderr_does_not_block_stdout(connection: Connection) -> None:
    # More than fits in any window or pipe. The test reads stdout only afterwards.
    command = "head -c 20000000 /dev/zero >&2; echo end >&2; echo done"
    status, output, stderr = run(connection, command)
    assert (status, output) == (0, b"done\n")
    assert len(stderr) == 1 << 16
    assert stderr.endswith(b"\0\0end\n")


def test_wait_raises_after_its_timeout(connection: Connection) -> None:
    process = connection.start("echo started; exec cat")
    assert process.read() == b"started\n"
    with pytest.raises(TimeoutError):
        process.wait(0.05)
    process.close()


def test_several_processes_share_a_connection(connection: Connection) -> None:
    def one(number: int) -> bytes:
        return run(connection, "cat; head -c 300000 /dev/zero", b"%d" % number)[1]

    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(one, range(8)))
    assert outputs == [b"%d" % number + bytes(300_000) for number in range(8)]


def test_writes_of_several_threads_do_not_interleave(connection: Connection) -> None:
    process = connection.start("cat")
    with ThreadPoolExecutor(4) as pool:
        written = pool.map(lambda letter: process.write(letter * 200_000), [b"a", b"b", b"c", b"d"])
        closer = pool.submit(lambda: (list(written), process.close_stdin()))
        output = read_all(process)
        closer.result()
    assert len(output) == 800_000
    runs = sum(1 for i in range(1, len(output)) if output[i] != output[i - 1]) + 1
    assert runs == 4


def test_writing_to_a_process_that_has_ended_is_harmless(connection: Connection) -> None:
    process = connection.start("exit 5")
    assert process.wait(HANG) == 5
    assert read_all(process) == b""
    for _ in range(3):
        process.write(b"x" * 100_000)
    process.close_stdin()
    process.write(b"and after the end")
    assert process.wait(HANG) == 5


def test_closing_a_process_ends_a_blocked_read(connection: Connection) -> None:
    process = connection.start("echo started; exec cat")
    assert process.read() == b"started\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(process.read)
        process.close()
        assert waiting.result(HANG) == b""
    process.close()


def test_closing_a_process_ends_a_blocked_write(connection: Connection, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = connection.start(f"echo started; read -r word <{gate}")
    assert process.read() == b"started\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(process.write, bytes(50 << 20))
        process.close()
        waiting.result(HANG)
    gate.write_text("go\n")


def test_follow_passes_on_all_output_and_the_end(connection: Connection) -> None:
    process = connection.start("head -c 10000000 /dev/zero; exit 3")
    sizes: list[int] = []
    ended = threading.Event()

    def receive(data: bytes | ConnectError) -> bool:
        assert isinstance(data, bytes)
        sizes.append(len(data))
        if not data:
            ended.set()
        return True

    process.follow(receive)
    assert ended.wait(HANG)
    assert sum(sizes) == 10000000
    assert 0 not in sizes[:-1]
    assert process.wait(HANG) == 3


def test_follow_ends_with_the_connection(connection: Connection) -> None:
    process = connection.start("echo; cat")
    pieces: queue.SimpleQueue[bytes | ConnectError] = queue.SimpleQueue()
    process.follow(lambda data: not pieces.put(data))
    assert pieces.get(timeout=HANG) == b"\n"
    connection.close()
    assert pieces.get(timeout=HANG) == b""


def test_follow_ends_once_the_receiver_wants_no_more(connection: Connection) -> None:
    process = connection.start("exec yes")
    pieces: queue.SimpleQueue[bytes | ConnectError] = queue.SimpleQueue()
    process.follow(lambda data: bool(pieces.put(data)))
    assert pieces.get(timeout=HANG)
    assert run(connection, "echo still works")[1] == b"still works\n"
    process.close()
    connection.close()
    assert pieces.empty()


def test_closing_a_process_does_not_kill_it(connection: Connection, tmp_path: Path) -> None:
    gate, proof = tmp_path / "gate", tmp_path / "proof"
    os.mkfifo(gate)
    os.mkfifo(proof)
    process = connection.start(
        f"trap '' HUP; echo started; exec >&- 2>&-; read -r word <{gate}; echo $word >{proof}"
    )
    assert process.read() == b"started\n"
    process.close()
    gate.write_text("alive\n")
    assert proof.read_text() == "alive\n"


def test_closing_the_connection_ends_all_reads(connection: Connection) -> None:
    processes = [connection.start("echo started; exec cat") for _ in range(3)]
    for process in processes:
        assert process.read() == b"started\n"

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(process.read) for process in processes]
        connection.close()
        assert [future.result(HANG) for future in waiting] == [b"", b"", b""]
    connection.close()
    with pytest.raises(ConnectError):
        connection.start("true")
