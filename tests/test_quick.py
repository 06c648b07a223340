"""`scripts/test --quick` installs no framework, so its tests must not import one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.limits import HANG

ROOT = Path(__file__).resolve().parents[1]
COLLECT = """\
import sys
sys.modules.update(torch=None, tensorflow=None)  # each import of them fails
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", *sys.argv[1:]]))
"""


def test_quick_tests_import_no_framework() -> None:
    listed = re.search(r"^quick=\(.*?\)$", (ROOT / "scripts/test").read_text(), re.M | re.S)
    assert listed
    places = ["bash", "-c", listed[0] + '; printf "%s\n" "${quick[@]}"']
    quick = subprocess.run(
        places, cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG
    )
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *quick.stdout.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
