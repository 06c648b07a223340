"""Progress of the workers of a launch on Slurm: of `dtrain.runtime`, and of what they print."""

from __future__ import annotations

import json
import sys

import pytest

from support.cluster import Launcher
from support.repository import committed
from support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.netns]


def test_workers_report_their_progress_with_the_launchers_runtime(
    slurm: Slurm, launcher: Launcher
) -> None:
    program = launcher.folder / "program.py"
    commit = committed(launcher.folder)
    program.write_text(
        "import time, dtrain.runtime.job as job\n"
        "from dtrain.runtime import progress\n"
        "print(job.__file__)\n"
        "for step in range(1, 9):\n"
        "    progress(step, total=8, loss=8 / step)\n"
        "    time.sleep(0.3)\n"
    )
    file = launcher.folder / "cluster.yaml"
    file.write_text(
        f"cluster: {{slurm: {{}}, nodes: 2, gpus: 2, python: {sys.executable}}}\n"
        f"job: {{framework: none, script: {program}}}\n"
    )
    done = launcher.run(file, env=slurm.environment)
    assert done.code == 0, str(done)
    assert done.stdout.count("/runtime.zip/dtrain/runtime/job.py") == 4, str(done)
    assert "step 8 of 8" in done.stderr
    (run,) = (launcher.home / "runs").iterdir()
    shown = launcher.command("ps", run.name).wait().stdout
    assert "step 8 of 8" in shown
    (report,) = json.loads(launcher.command("report", run.name, "--json").wait().stdout)["runs"]
    assert report["code"]["commit"] == commit
    assert "program.py" in report["code"]["changed"]


def test_what_workers_print_is_shown_as_progress(slurm: Slurm, launcher: Launcher) -> None:
    program = launcher.folder / "program.sh"
    program.write_text('for step in 1 2 3; do echo "step $step of 3, loss 0.$step"; done\n')
    file = launcher.folder / "cluster.yaml"
    file.write_text(
        "cluster: {slurm: {}, nodes: 2, gpus: 1}\n"
        f"job: {{framework: none, script: {program}, "
        "progress: {line: 'step {step} of {total}, loss {loss}'}}\n"
    )
    done = launcher.run(file, env=slurm.environment)
    assert done.code == 0, str(done)
    (run,) = (launcher.home / "runs").iterdir()
    assert "step 3 of 3" in launcher.command("ps", run.name).wait().stdout
