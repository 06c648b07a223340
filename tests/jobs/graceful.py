"""Count like `numbered.py`, and on SIGTERM continue until a second after the file ASKED exists.

graceful.py FOLDER [PAUSE [SIZE]]    ASKED is in FOLDER
"""

import signal
import sys
import threading
import time
from pathlib import Path

from numbered import main


def end_in_good_order() -> None:
    folder = Path(sys.argv[1])
    while not (folder / "asked").exists():
        time.sleep(0.02)
    time.sleep(1.0)
    (folder / "stop").touch()


signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end_in_good_order).start())
main()
