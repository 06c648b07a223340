"""Runs TensorBoard during training, on the chief only."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from dtrain.runtime.progress import tell
from dtrain.runtime.tensorflow.cluster import current_cluster

# The kernel kills TensorBoard when the process that started it ends, for any reason.
# prctl(PR_SET_PDEATHSIG) survives exec. The getppid check catches a parent that died before it.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_LISTENS = re.compile(r"http://127\.0\.0\.1:(\d+)/")


class TensorBoard:
    """A running TensorBoard. Prints its address once it listens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._listens = threading.Event()
        self._port: int | None = None
        threading.Thread(target=self._read, name="tensorboard", daemon=True).start()

    def port(self, timeout: float = 60) -> int:
        """The port on 127.0.0.1 where it listens. Waits up to ``timeout`` seconds.

        Raises RuntimeError if TensorBoard does not start to listen.
        """
        self._listens.wait(timeout)
        if self._port is None:
            raise RuntimeError("TensorBoard does not listen: see its messages")
        return self._port

    def _read(self) -> None:
        last: deque[str] = deque(maxlen=20)
        for line in self._process.stderr or ():
            last.append(line)
            if self._port is None and (found := _LISTENS.search(line)):
                self._port = int(found[1])
                sys.stdout.write(f"TensorBoard at http://127.0.0.1:{self._port}/\n")
                sys.stdout.flush()
                tell("tensorboard", port=self._port)
                self._listens.set()
        if self._port is None:
            sys.stderr.write(f"TensorBoard exited before it listened:\n{''.join(last)}")
        self._listens.set()


def tensorboard(logdir: str | Path, *, insist: bool = False) -> TensorBoard | None:
    """Serve the events in ``logdir`` on a free port of 127.0.0.1, until this process ends.

    It starts only on the chief, and only with ``DTRAIN_TENSORBOARD=1`` or ``insist``. Training does
    not wait for it. Otherwise it returns None, and also if TensorBoard is not installed (with a
    message). Call it from the main thread: TensorBoard ends with the thread that starts it.
    """
    wanted = insist or os.environ.get("DTRAIN_TENSORBOARD") == "1"
    if not wanted or not current_cluster().is_chief:
        return None
    if importlib.util.find_spec("tensorboard") is None:
        sys.stderr.write(
            "warning: TensorBoard is not installed for this Python (`pip install tensorboard`);"
            " training continues without it\n"
        )
        return None
    # TensorBoard picks a free port itself, so no other process can take it in between.
    # load_fast would start a second program, which would outlive the first.
    options = ["--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0", "--load_fast=false"]
    me = str(os.getpid())
    command = [sys.executable, "-c", _DIE_WITH_PARENT, me, "-m", "tensorboard.main", *options]
    return TensorBoard(
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    )
