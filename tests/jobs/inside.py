"""Report what a worker sees, then wait to be stopped.

inside.py show              print one line of JSON, and write the file `made-RANK`
inside.py exit CODE         exit with a status
inside.py signal NUMBER     send itself a signal
inside.py fill              fill the memory
inside.py wait [ignore]     wait for TERM, and count it; `ignore` goes on then
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def shown_to_others(text: str) -> bool:
    """Whether a command line on this host contains ``text``."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (process / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def show() -> None:
    import dtrain.runtime  # from the archive that dtrain sends

    Path(f"made-{os.environ['RANK']}").write_text("by a worker")
    secret = os.environ.get("TOKEN", "")
    report = {
        "inside": Path("/etc/marked").exists(),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "user": [os.getuid(), os.getgid()],
        "runtime": dtrain.runtime.__file__,
        "shown": bool(secret) and shown_to_others(secret),
        "stdin": os.readlink("/proc/self/fd/0"),
    }
    print(json.dumps(report), flush=True)


def wait(ignore: bool) -> None:
    def on_term(*_: object) -> None:
        print("got TERM", flush=True)
        if not ignore:
            # Long enough to see a second one.
            time.sleep(0.5)
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_term)
    print("waiting", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    if how == "show":
        show()
    elif how == "exit":
        sys.exit(int(rest[0]))
    elif how == "signal":
        os.kill(os.getpid(), int(rest[0]))
        signal.pause()
    elif how == "fill":
        print(len(b"x" * (1 << 30)))
    else:
        wait(rest == ["ignore"])
