"""Many simulated hosts, as `scripts/bench/many_hosts.py` starts them, in small numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.limits import HANG

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "many_hosts.py"


def test_the_bench_of_many_hosts_runs_with_few() -> None:
    """It exits with 0 only if the launcher did what it must: start all hosts or none, follow all
    lines, stop all hosts after a failure, reconnect, and name the faulty host."""
    few = ["--hosts", "4", "--ranks", "2", "--seconds", "1.5", "--processes", "1"]
    done = subprocess.run(
        [sys.executable, str(BENCH), *few],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    launches = [line.split()[0] for line in done.stdout.splitlines() if " s CPU" in line]
    assert launches == ["start", "output", "failure", "drop", "refusal"], done.stdout
