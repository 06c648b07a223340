"""Ranks that exchange messages in each step, and say how long they computed.

lock_step.py SECONDS BYTES: in each step a rank computes, and then sends a message. Rank 0 waits for
those of all others, and answers with one byte. The job ends once $STOP exists.
"""

import os
import socket
import sys
import time
from pathlib import Path

from dtrain.runtime import progress

seconds, size = float(sys.argv[1]), int(sys.argv[2])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def connected() -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            time.sleep(0.05)


def take(peer: socket.socket) -> None:
    left = size
    while left > 0:
        left -= len(peer.recv(left)) or sys.exit("the peer is gone")


if rank == 0:
    listener = socket.create_server(address)
    peers = [listener.accept()[0] for _ in range(world - 1)]
else:
    peers = [connected()]
step, more = 0, b"+"
while more == b"+":
    step += 1
    time.sleep(seconds)
    if rank == 0:
        for peer in peers:
            take(peer)
        more = b"-" if Path(os.environ["STOP"]).exists() else b"+"
        for peer in peers:
            peer.sendall(more)
    else:
        peers[0].sendall(bytes(size))
        more = peers[0].recv(1)
    progress(step, compute_seconds=seconds)
