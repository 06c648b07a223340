"""Processes that need not import their modules: forks of a server that has imported them.

A new process spends 2 to 4 s on the import of torch or TensorFlow, and `dtrain` half a second. A
script that needs no launcher saves it:

    process = server(*TORCH).start(script, "--steps", "5", environment={...})
    output, _ = process.communicate()
    process = dtrain("launch", "cluster.yaml", environment={...})

A process has a session of its own, and gets the environment, folder and arguments that a new Python
would get. What a framework reads from the environment while it is imported must be in `server`.
"""

from __future__ import annotations

import errno
import functools
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TextIO

IMPORTED = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PYTHONUNBUFFERED": "1",
    "LANG": "C.UTF-8",
}
"""What frameworks read while they are imported. One thread each, so that a fork loses none."""
ROOT = Path(__file__).resolve().parents[2]
SOURCES = [str(ROOT / "launcher"), str(ROOT / "cli")]
DTRAIN = Path(sys.executable).with_name("dtrain")
COMMANDS = sorted(
    f"dtrain_cli.commands.{file.stem}"
    for file in (ROOT / "cli" / "dtrain_cli" / "commands").glob("[a-z]*.py")
)
"""Import almost all that a command does; the rest is imported when it is needed."""
NEEDED_LATER = [
    "dtrain.parallelism.answer.alternatives",
    "dtrain.planning.question",
    "dtrain.transport.ssh",
    "dtrain.node.telemetry",
    "dtrain_cli.views.layouts",
    "dtrain_cli.views.paper",
    "dtrain_cli.views.plain",
    "dtrain_cli.views.question",
    *(["typer._adapters"] if importlib.util.find_spec("typer._adapters") else []),
]
"""What commands import while they run. Some versions of Typer import pydantic there, which costs as
much as all else in a short command."""
TORCH = ("dtrain.runtime.torch", "torch._inductor.compile_fx")
"""The runtime for torch, and what each rank that compiles would import. One server for all tests
with torch."""
Stream = int | IO[Any] | None


class Process:
    """One process, with what the tests need of `subprocess.Popen`. Its standard output and error go
    to the pipes of these streams, if any."""

    def __init__(self, output: int | None, errors: int | None, status: int) -> None:
        self.stdout = _text(output)
        self.stderr = _text(errors)
        self._status: TextIO = open(status)  # noqa: SIM115
        started = self._status.readline()
        assert started, "the server could not import its modules"
        self.pid = int(started)
        self.returncode: int | None = None
        self._ended = threading.Thread(target=self._wait, daemon=True)
        self._ended.start()

    def _wait(self) -> None:
        with self._status:
            self.returncode = int(self._status.readline() or -signal.SIGKILL)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._ended.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        read = {name: pipe for name, pipe in (("out", self.stdout), ("", self.stderr)) if pipe}
        texts = {name: "" for name in ("out", "") if name not in read}

        def read_all(name: str) -> None:
            texts[name] = read[name].read()

        readers = [threading.Thread(target=read_all, args=(name,), daemon=True) for name in read]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
        if len(texts) < 2:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        self.wait(timeout)
        return texts["out"], texts[""]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """Forks processes that have imported ``modules``. All workers of pytest share it, and it ends
    with the pytest that started them."""

    def __init__(self, *modules: str) -> None:
        tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        imports = hashlib.sha256(repr(modules).encode()).hexdigest()[:16]
        self.address = f"\0dtrain-tests-{tests}-{imports}"
        self._socket = _socket()
        while True:
            _serve_at(self.address, tests, modules)
            try:
                self._socket.connect(self.address)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)  # another worker does not listen yet, or its server has ended
        if _user(self._socket) != os.geteuid():
            raise PermissionError("another user has the socket of the tests")

    def start(
        self,
        script: Path,
        *arguments: object,
        environment: Mapping[str, str],
        folder: Path | None = None,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.STDOUT,
    ) -> Process:
        """The streams are those of `subprocess.Popen`."""
        request = {
            "argv": [str(script), *map(str, arguments)],
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
        }
        pipes = {
            name: os.pipe()
            for name, stream in (("status", subprocess.PIPE), ("out", stdout), ("err", stderr))
            if stream == subprocess.PIPE
        }
        output = pipes["out"][1] if "out" in pipes else _number(stdout)
        errors = pipes["err"][1] if "err" in pipes else _number(stderr)
        fds = [pipes["status"][1], output, output if stderr == subprocess.STDOUT else errors]
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        for _, theirs in pipes.values():
            os.close(theirs)
        ours = {name: pipe for name, (pipe, _) in pipes.items()}
        return Process(ours.get("out"), ours.get("err"), ours["status"])


def _serve_at(address: str, tests: int, modules: tuple[str, ...]) -> None:
    """Start a server unless there is one."""
    with _socket() as listening:
        try:
            listening.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return
        listening.listen(64)
        subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno()), str(tests), *modules],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **IMPORTED, "PYTHONPATH": os.pathsep.join(SOURCES)},
            pass_fds=[listening.fileno()],
        )


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user(connected: socket.socket) -> int:
    """The user of the process at the other end. Any user can connect to a socket without a file."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _number(stream: Stream) -> int:
    """The descriptor of an open file."""
    assert stream is not None
    return stream if isinstance(stream, int) else stream.fileno()


def _text(pipe: int | None) -> TextIO | None:
    return None if pipe is None else open(pipe, encoding="utf-8", errors="replace")


@functools.cache
def server(*modules: str) -> Server:
    return Server(*modules)


def dtrain(*arguments: str, **options: Any) -> Process:
    """A `dtrain` command; ``options`` as of `Server.start`."""
    return server(*COMMANDS, *NEEDED_LATER).start(DTRAIN, *arguments, **options)


def serve(listening: socket.socket, tests: int) -> dict[str, Any]:
    """Fork a process for each request, until the process ``tests`` ends. Returns in each fork,
    which then is the process: the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    gc.freeze()
    with selectors.DefaultSelector() as selector:
        end = os.pidfd_open(tests)
        for source in (listening, end):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source = key.fileobj
                if source == end:
                    os._exit(0)
                assert isinstance(source, socket.socket)
                if source is listening:
                    connected, _ = source.accept()
                    if _user(connected) == os.geteuid():
                        selector.register(connected, selectors.EVENT_READ)
                    else:
                        connected.close()
                    continue
                message, fds, _, _ = socket.recv_fds(source, 1 << 20, 3)
                if not message:
                    selector.unregister(source)
                    source.close()
                elif os.fork() == 0:
                    os.close(end)
                    for other in list(selector.get_map().values()):
                        if isinstance(other.fileobj, socket.socket):
                            other.fileobj.close()
                    selector.close()
                    fork_and_wait(*fds)
                    request: dict[str, Any] = json.loads(message)
                    return request
                for fd in fds:
                    os.close(fd)


def fork_and_wait(status: int, output: int, errors: int) -> None:
    """Fork the process and report its end. Returns in the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.close(output)
        os.close(errors)
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for fd in (status, output, errors):
        os.close(fd)


def become(request: Mapping[str, Any]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does."""
    script = request["argv"][0]
    environment = request["environment"]
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(environment)
    if script == str(DTRAIN):
        # As a new Python opens it; the server's is not buffered.
        sys.stdout = open(1, "w", encoding="utf-8", errors=sys.stdout.errors, closefd=False)  # noqa: SIM115
    sys.argv[:] = request["argv"]
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[0:1] = [str(Path(script).parent), *paths]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)  # noqa: S102 - as Python does


if __name__ == "__main__":
    for module in sys.argv[3:]:
        importlib.import_module(module)
    become(serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
