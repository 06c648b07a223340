"""The `dtrain` script, and `python -m dtrain_cli` for use when it is not on PATH."""

import os
from typing import NoReturn


def main() -> NoReturn:
    try:
        from dtrain_cli import app

        app.main()
    except KeyboardInterrupt:  # Ctrl-C while Python still imports
        os._exit(130)


if __name__ == "__main__":
    main()
