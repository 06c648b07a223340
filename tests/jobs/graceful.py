"""Count as `numbered.py` does, and when told to end go on for a second before it does.

graceful.py FOLDER [PAUSE [SIZE]]
"""

import signal
import sys
import threading
from pathlib import Path

from numbered import main


def end_in_good_order(*_: object) -> None:
    threading.Timer(1.0, (Path(sys.argv[1]) / "stop").touch).start()


signal.signal(signal.SIGTERM, end_in_good_order)
main()
