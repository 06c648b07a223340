"""Ends a process that waits too long for its peers. `deadline.py` runs it as a program.

It is a separate process because the waiting process runs no Python: neither threads nor signal
handlers. Its standard input is a pipe from that process, which closes it once all peers are ready.

Arguments: seconds, the waiting process's ID and name, and its peers as JSON, address by name.
"""

import json
import os
import select
import signal
import socket
import sys
import time


def silent(peers: dict[str, str]) -> list[str]:
    """The peers whose port accepts no connection."""
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
    # Ctrl-C on the terminal and a launcher's TERM are meant for the watched process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if select.select([sys.stdin], [], [], float(seconds))[0]:
        return
    missing = silent(json.loads(peers))
    who = "no answer from " + ", ".join(missing) if missing else "all of them answer now"
    sys.stderr.write(
        f"error: {name} waited {float(seconds):.0f} s for its peers: {who}. Check that each was"
        " started and whether a firewall lets its port through; DTRAIN_START_TIMEOUT sets the"
        " seconds.\n"
    )
    sys.stderr.flush()
    # TensorFlow ignores TERM and INT while it waits. HUP ends it and, unlike KILL, does not look
    # like an OOM kill. A process that ignores HUP must be killed.
    os.kill(int(pid), signal.SIGHUP)
    time.sleep(2)
    if os.getppid() == int(pid):
        os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
