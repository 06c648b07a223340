"""The `dtrain` script, and `python -m dtrain_cli` for use when it is not on PATH."""

import gc
import os
import sys


def main() -> None:
    # Imports make no garbage, and the default of 700 objects looks for it hundreds of times.
    gc.set_threshold(100_000)
    # As if `invoke` were not installed. paramiko imports it, with asyncio and unittest (50 ms), for
    # a keyword of ssh's configuration, which dtrain reads itself.
    sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        from dtrain_cli import app

        app.main()
    except KeyboardInterrupt:  # Ctrl-C while Python still imports
        os._exit(130)


if __name__ == "__main__":
    main()
