"""Count like `numbered.py`, and resist every way to be ended.

    hostile.py FOLDER [PAUSE [SIZE]]

The worker ignores TERM. It starts 200 processes that ignore TERM too, each in its own session,
orphaned, with the worker's log files open. Half of them continue in a chain of processes.
"""

import os
import signal
import time

from numbered import main

PROCESSES, LIFE = 200, 2.0


def stay(*, hop: bool) -> None:
    """Stay, or continue in a chain of processes, each in a new session."""
    while True:
        os.setsid()
        while not hop:
            time.sleep(3600)
        time.sleep(LIFE)
        if os.fork() != 0:
            os._exit(0)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
for which in range(PROCESSES):
    if os.fork() == 0:
        if os.fork() != 0:
            os._exit(0)
        stay(hop=which % 2 == 0)
    os.wait()
main()
