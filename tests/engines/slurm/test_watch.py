"""What is seen of a Slurm job, without a Slurm."""

from __future__ import annotations

from pathlib import Path

from dtrain.engines.slurm.watch import SlurmWatch
from dtrain.messages.agent import Kernel
from dtrain.runs.folder import RunFolder
from dtrain.session.reporting.observer import Observer
from dtrain.session.reporting.recorder import Recorder
from support.stored import RECORD


def test_an_order_waits_for_the_watcher_of_its_machine(tmp_path: Path) -> None:
    """Watchers start seconds after the job, and what they get before is lost."""
    folder = RunFolder(tmp_path)
    watch = SlurmWatch(RECORD.plan, folder, Recorder(folder, Observer()))
    for machine in watch.machines.values():
        machine.request_stacks(abort=False, ras=False)
    assert watch.orders == []
    first, *others = watch.machines
    for _ in range(2):
        watch.machine_said(first, Kernel(1.0, (), ()))
    assert [order.get("host") for order in watch.orders] == [first]
    watch.machines[first].request_stacks(abort=True, ras=False)
    assert len(watch.orders) == 2
    assert others
