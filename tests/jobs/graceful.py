"""Count like `numbered.py`, and on SIGTERM continue for a second.

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
