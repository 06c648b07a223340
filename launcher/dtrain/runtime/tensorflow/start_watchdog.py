"""End a process that waits for its peers for too long. Run as a program by `deadline.py`.

It is a process of its own because the one that waits runs no Python meanwhile: neither a thread
nor a signal handler. Its standard input is a pipe from there, closed when all peers are in.

Arguments: seconds, the waiting process's id and name, and its peers as JSON, address by name.
"""

import json
import os
import select
import signal
import socket
import sys
import time


def silent(peers: dict[str, str]) -> list[str]:
    """The peers whose port takes no connection."""
    missing = []
    for name, address in peers.items():
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError as error:
            missing.append(f"{name} at {address} ({error.strerror or error})")
    return missing


def main() -> None:
    seconds, pid, name, peers = sys.argv[1:]
    # The terminal's Ctrl-C and a launcher's TERM are for the process that is watched.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if select.select([sys.stdin], [], [], float(seconds))[0]:
        return
    missing = silent(json.loads(peers))
    who = "no answer from " + ", ".join(missing) if missing else "all of them answer by now"
    sys.stderr.write(
        f"error: {name} waited {float(seconds):.0f} s for its peers: {who}. Look whether each was"
        " started and whether a firewall lets its port through; DTRAIN_START_TIMEOUT sets the"
        " seconds.\n"
    )
    sys.stderr.flush()
    # TensorFlow ignores TERM and INT while it waits. HUP ends it and is not taken for a want of
    # memory, as KILL would be; a process that was told to ignore HUP gets no other choice.
    os.kill(int(pid), signal.SIGHUP)
    time.sleep(2)
    if os.getppid() == int(pid):
        os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
