"""The transport for this machine: commands run as subprocesses."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dtrain.diagnostics import ConnectError, reason_of
from dtrain.spec.model import Host
from dtrain.transport.tail import Tail

STDERR_GRACE = 2.0
"""Seconds that `wait` waits for the end of stderr after the command exits. A background process
of the command may hold stderr open forever."""


class LocalTransport:
    """Runs commands on this machine with ``/bin/sh``."""

    def connect(self, host: Host) -> LocalConnection:
        return LocalConnection(host.name)

    def close(self) -> None:
        """Does nothing: local connections share nothing."""


class LocalConnection:
    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._processes: set[LocalProcess] = set()
        self._closed = False

    def start(self, command: str) -> LocalProcess:
        """Raises ConnectError if this machine cannot start another process or thread."""
        with self._lock:
            if self._closed:
                raise ConnectError(self._host, "starting a command", "the connection is closed")
            try:
                process = LocalProcess(command)
            except (OSError, RuntimeError, ValueError) as error:
                raise ConnectError(
                    self._host,
                    "starting a command with /bin/sh",
                    reason_of(error),
                    hint="free memory or raise the limits on processes and open files (ulimit -a)",
                ) from error
            self._processes = {other for other in self._processes if not other.closed} | {process}
            return process

    def dial(self, port: int, timeout: float) -> socket.socket:
        try:
            stream = socket.create_connection(("127.0.0.1", port), timeout)
        except OSError as error:
            raise ConnectError(
                self._host, f"connecting to its port {port}", reason_of(error)
            ) from error
        stream.settimeout(None)
        return stream

    def close(self) -> None:
        with self._lock:
            self._closed = True
            processes, self._processes = self._processes, set()
        for process in processes:
            process.close()


class LocalProcess:
    """A command in its own session, so that Ctrl-C on the terminal does not reach it.

    Closing a descriptor does not wake a thread that sleeps in read(2) or write(2) on it. So each
    thread sleeps in poll(2) on its pipe and on ``_close_reader``, and `close` takes the lock of
    each pipe before it closes that pipe.
    """

    def __init__(self, command: str) -> None:
        self._popen = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdin and self._popen.stdout and self._popen.stderr  # noqa: S101 (types)
        self._stdin = self._popen.stdin
        self._stdout = self._popen.stdout
        self._stderr = self._popen.stderr
        os.set_blocking(self._stdin.fileno(), False)
        self._close_reader, self._close_writer = os.pipe()
        self._closed = False
        self._close_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._tail = Tail()
        self._exited = threading.Event()
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        try:
            threading.Thread(target=self._reap, daemon=True).start()
            self._drain.start()
        except RuntimeError:  # this machine has no free thread
            with suppress(ProcessLookupError):  # it has ended already
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.__exit__(None, None, None)
            os.close(self._close_writer)
            os.close(self._close_reader)
            raise

    @property
    def closed(self) -> bool:
        return self._closed

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._write_lock:
            while view and not self._stdin.closed and self._ready(self._stdin, select.POLLOUT):
                try:
                    view = view[os.write(self._stdin.fileno(), view) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    return

    def close_stdin(self) -> None:
        with self._write_lock:
            self._stdin.close()

    def read(self, size: int = 1 << 18) -> bytes:
        with self._read_lock:
            if self._stdout.closed or not self._ready(self._stdout, select.POLLIN):
                return b""
            return os.read(self._stdout.fileno(), size)

    def follow(self, receive: Callable[[bytes | ConnectError], bool]) -> None:
        def pump() -> None:
            while receive(data := self.read()) and data:
                pass

        threading.Thread(target=pump, daemon=True).start()

    def stderr(self) -> bytes:
        return self._tail.contents()

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._exited.wait(timeout):
            raise TimeoutError(f"still running after {timeout:g} s")
        left = STDERR_GRACE if deadline is None else max(0.0, deadline - time.monotonic())
        self._drain.join(min(STDERR_GRACE, left))
        return self._popen.returncode

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        os.close(self._close_writer)
        with self._write_lock:
            self._stdin.close()
        with self._read_lock:
            self._stdout.close()
        self._drain.join()
        os.close(self._close_reader)

    def _ready(self, pipe: object, event: int) -> bool:
        """Wait until ``pipe`` is ready. Returns False after `close`."""
        poll = select.poll()
        poll.register(self._close_reader, select.POLLIN)
        poll.register(pipe, event)  # type: ignore[arg-type]
        poll.poll()
        return not self._closed

    def _drain_stderr(self) -> None:
        while self._ready(self._stderr, select.POLLIN):
            data = os.read(self._stderr.fileno(), 1 << 16)
            if not data:
                break
            self._tail.feed(data)
        self._stderr.close()

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            self._popen.wait()
        self._exited.set()
