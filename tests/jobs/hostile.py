"""Count as `numbered.py` does, and do everything not to be ended.

    hostile.py FOLDER [PAUSE [SIZE]]

The worker ignores TERM. Around it are 200 processes that ignore it too: each in a session of its
own, orphaned, with the worker's log files open and a child of the same kind in its place as soon
as it ends.
"""

import os
import signal
import time

from numbered import main

PROCESSES, LIFE = 200, 2.0


def hop() -> None:
    """Live on in one process after another, each of which leaves its parent's session."""
    while True:
        os.setsid()
        time.sleep(LIFE)
        if os.fork() != 0:
            os._exit(0)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
for _ in range(PROCESSES):
    if os.fork() == 0:
        if os.fork() != 0:
            os._exit(0)
        hop()
    os.wait()
main()
