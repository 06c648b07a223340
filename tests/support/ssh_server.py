"""An SSH server inside the test process, to plant faults in by subclassing.

    with SshServer(authorized=public_key_blob) as server:
        server.port, server.host_key_line, server.connections

`SshServer` runs real commands and accepts one key. Override `greet` to misbehave before SSH
starts, `Login` (through ``login``) to misbehave after; `TwoFactor` requires more than a key.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST


class Login(paramiko.ServerInterface):
    """One client: who may log in, and what it may do."""

    def __init__(self, server: SshServer) -> None:
        self.server = server
        self.asked: threading.Thread | None = None
        """What will run the command that the client just asked for."""
        self.dialled: dict[int, socket.socket] = {}
        """Connections to ports of this machine, by the channel that they are for."""

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if key.asbytes() == self.server.authorized:
            return paramiko.AUTH_SUCCESSFUL
        return paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if kind == "session":
            return paramiko.OPEN_SUCCEEDED
        return paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        try:
            self.dialled[chanid] = socket.create_connection(destination)
        except OSError:
            return paramiko.OPEN_FAILED_CONNECT_FAILED
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.asked = threading.Thread(
            target=self.server.execute, args=(channel, command), daemon=True
        )
        return True


CODE = "314 159"


class TwoFactor(Login):
    """Wants a key, and then a name and a code, for which it asks (keyboard-interactive)."""

    methods: ClassVar[tuple[str, ...]] = ("publickey", "keyboard-interactive")
    """The authentication steps, in order."""

    def __init__(self, server: SshServer) -> None:
        super().__init__(server)
        self.left = list(self.methods)
        self.heard: list[list[str]] = []

    def get_allowed_auths(self, username: str) -> str:
        return self.left[0] if self.left else ""

    def passed(self) -> int:
        self.left.pop(0)
        return paramiko.AUTH_PARTIALLY_SUCCESSFUL if self.left else paramiko.AUTH_SUCCESSFUL

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        accepted = super().check_auth_publickey(username, key) == paramiko.AUTH_SUCCESSFUL
        return self.passed() if accepted else paramiko.AUTH_FAILED

    def check_auth_interactive(
        self, username: str, submethods: str
    ) -> paramiko.InteractiveQuery | int:
        if not self.left or self.left[0] != "keyboard-interactive":
            return paramiko.AUTH_FAILED
        return self.query()

    def query(self) -> paramiko.InteractiveQuery:
        return paramiko.InteractiveQuery("Two steps", "", ("Name: ", True), ("Code:", False))

    def check_auth_interactive_response(
        self, responses: list[str]
    ) -> paramiko.InteractiveQuery | int:
        self.heard.append(responses)
        return self.passed() if responses == ["me", CODE] else paramiko.AUTH_FAILED


class OrderlyTransport(paramiko.Transport):
    """Runs a command after the client got the confirmation.

    paramiko replies after `Login.check_channel_exec_request` has returned; a short command that
    was started in there could end, and close its channel, before the reply. No sshd does that.
    """

    def _answer_and_run(channel: paramiko.Channel, request: paramiko.Message) -> None:
        channel._handle_request(request)
        login = channel.transport.server_object
        login.asked, asked = None, login.asked
        if asked is not None:
            asked.start()

    _channel_handler_table = paramiko.Transport._channel_handler_table | {
        ord(cMSG_CHANNEL_REQUEST): _answer_and_run
    }


class SshServer:
    login: type[Login] = Login

    def __init__(self, authorized: bytes, host_key: paramiko.PKey | None = None) -> None:
        self.authorized = authorized
        self.host_key = host_key or paramiko.ECDSAKey.generate()
        self.connections = 0
        """TCP connections accepted so far."""
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._streams: list[socket.socket] = []
        self._transports: list[paramiko.Transport] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = int(self._listener.getsockname()[1])

    @property
    def host_key_line(self) -> str:
        """Its line of a known_hosts file."""
        key = self.host_key
        return f"[127.0.0.1]:{self.port} {key.get_name()} {key.get_base64()}\n"

    def __enter__(self) -> SshServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def greet(self, stream: socket.socket, number: int) -> bool:
        """Called with each new connection, counted from 1; True to go on with SSH."""
        return True

    def drop_connections(self) -> None:
        """Break every connection, as a crash would."""
        with self._lock:
            transports, self._transports = self._transports, []
            streams, self._streams = self._streams, []
        for transport in transports:
            transport.packetizer.complete_handshake()
            transport.close()
        for stream in streams:
            stream.close()

    def execute(self, channel: paramiko.Channel, command: bytes) -> None:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with self._lock:
            self._processes.append(process)
        assert process.stdin and process.stdout and process.stderr
        pumps = [
            threading.Thread(target=_pump, args=(process.stdout.fileno(), channel.sendall)),
            threading.Thread(target=_pump, args=(process.stderr.fileno(), channel.sendall_stderr)),
        ]
        for pump in pumps:
            pump.daemon = True
            pump.start()
        threading.Thread(target=_feed, args=(channel, process), daemon=True).start()
        for pump in pumps:
            pump.join()
        status = process.wait()
        with suppress(OSError, EOFError, paramiko.SSHException):
            if status < 0:
                _send_exit_signal(channel, signal.Signals(-status).name[3:])
            else:
                channel.send_exit_status(status)
            channel.close()

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                number = self.connections
                self._streams.append(stream)
            threading.Thread(target=self._serve, args=(stream, number), daemon=True).start()

    def _serve(self, stream: socket.socket, number: int) -> None:
        if not self.greet(stream, number):
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()
            return
        transport = OrderlyTransport(stream)
        transport.add_server_key(self.host_key)
        with self._lock:
            self._transports.append(transport)
        with suppress(OSError, EOFError, paramiko.SSHException):
            login = self.login(self)
            transport.start_server(event=threading.Event(), server=login)
            self._pass_on(transport, login)

    def _pass_on(self, transport: paramiko.Transport, login: Login) -> None:
        """Connect the channels that lead to a port with it, until the client leaves."""
        kept = []  # paramiko closes unreferenced channels
        while transport.is_active():
            channel = transport.accept(0.5)
            if channel is None:
                continue
            kept.append(channel)
            peer = login.dialled.pop(channel.chanid, None)
            if peer is not None:
                for pump in (_pump_to_peer, _pump_to_channel):
                    threading.Thread(target=pump, args=(channel, peer), daemon=True).start()


def _pump(source: int, send: Callable[[bytes], object]) -> None:
    with suppress(OSError, EOFError, paramiko.SSHException):
        while data := os.read(source, 1 << 15):
            send(data)


def _pump_to_peer(channel: paramiko.Channel, peer: socket.socket) -> None:
    with suppress(OSError, EOFError, paramiko.SSHException):
        while data := channel.recv(1 << 15):
            peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)


def _pump_to_channel(channel: paramiko.Channel, peer: socket.socket) -> None:
    with peer:
        _pump(peer.fileno(), channel.sendall)
    with suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()


def _feed(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    with suppress(OSError, EOFError, paramiko.SSHException), process.stdin:
        while data := channel.recv(1 << 15):
            process.stdin.write(data)
            process.stdin.flush()


def _send_exit_signal(channel: paramiko.Channel, name: str) -> None:
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(name)
    message.add_boolean(False)
    message.add_string("")
    message.add_string("")
    channel.transport._send_user_message(message)  # type: ignore[union-attr]
