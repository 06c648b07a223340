"""Count as `numbered.py` does, and do everything not to be ended.

    hostile.py FOLDER [PAUSE [SIZE]]

The worker ignores TERM. Around it are 200 processes that ignore it too: each in a session of its
own, orphaned, with the worker's log files open. Half of them live on in one process after another.
"""

import os
import signal
import time

from numbered import main

PROCESSES, LIFE = 200, 2.0


def linger(*, hop: bool) -> None:
    """Stay, or live on in one process after another, each of which leaves its parent's session."""
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
        linger(hop=which % 2 == 0)
    os.wait()
main()
