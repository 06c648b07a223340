"""Programs that say what a real framework does, for comparisons with the planner."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.limits import HANG
from support.warm import server


def ask(imported: Sequence[str], program: Path, *arguments: str) -> Any:
    """The JSON that a program prints. ``imported`` are its slowest imports."""
    process = server(*imported).start(
        program, *arguments, environment=os.environ, stderr=subprocess.PIPE
    )
    output, errors = process.communicate(HANG)
    assert process.wait() == 0, errors
    return json.loads(output)
