"""Leave behind every kind of process that is hard to end, then sleep, exit or fail.

    zombies.py [sleep | exit | fail]

Children of three kinds: in their own session, orphaned by a double fork, and ignoring every
signal that can be ignored. The worker itself ignores SIGTERM. Standard library only.
"""

import os
import signal
import sys
import time

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stay(*, session: bool, orphan: bool, deaf: bool) -> None:
    """Start a process that does nothing for an hour; returns in the parent when it is ready."""
    ready, announce = os.pipe()
    if os.fork() == 0:
        if session:
            os.setsid()
        if orphan and os.fork() != 0:
            os._exit(0)
        if deaf:
            for number in IGNORED:
                signal.signal(number, signal.SIG_IGN)
        os.write(announce, b".")
        while True:
            time.sleep(3600)
    os.read(ready, 1)
    os.close(ready)
    os.close(announce)


def main() -> None:
    stay(session=True, orphan=False, deaf=False)
    stay(session=True, orphan=True, deaf=False)
    stay(session=True, orphan=True, deaf=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("lingering", flush=True)
    end = (sys.argv[1:] or ["sleep"])[0]
    if end == "fail":
        raise SystemExit("failed on purpose")
    while end == "sleep":
        time.sleep(3600)


if __name__ == "__main__":
    main()
