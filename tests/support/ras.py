"""A server that answers like NCCL's RAS service; a script can run it, too."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

HEAD = """\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          2            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         2         4         4   RUNNING  MISMATCH

Errors
======


Warnings
========

"""
MISMATCH = (
    HEAD
    + """\
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 64
  Rank 2 has launched up to operation 60 -- GPU 0 managed by process 1650386 on node 10.0.0.2

"""
)


class RasServer:
    """Answers each connection. ``answer`` is what it sends instead of lines of the protocol."""

    def __init__(self, report: str = MISMATCH, port: int = 0, answer: bytes | None = None) -> None:
        self._report, self._answer = report, answer
        self._listening = socket.create_server(("127.0.0.1", port))
        self.address: tuple[str, int] = self._listening.getsockname()
        self.asked: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # ends the wait in `accept`
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listening.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rwb") as stream:
            for line in stream:
                command = line.decode().strip().lower()
                self.asked.append(command)
                if self._answer is not None:
                    stream.write(self._answer)
                    stream.flush()
                    return
                if command.startswith("client protocol "):
                    stream.write(b"SERVER PROTOCOL 2\n")
                elif command.startswith("timeout "):
                    stream.write(b"OK\n")
                elif command in ("status", "verbose status"):
                    stream.write(self._report.encode())
                    stream.flush()
                    return
                else:
                    stream.write(b"ERROR: Unknown command " + line)
                stream.flush()
