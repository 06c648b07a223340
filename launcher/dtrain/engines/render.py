"""What an engine runs, as text: the batch script, for an engine that takes one."""

from __future__ import annotations

from dtrain.engines.slurm import script
from dtrain.launchplan.plan import LaunchPlan


def batch_script(plan: LaunchPlan) -> dict[str, str]:
    """The engine's batch script by its file name; empty for SSH, which needs none."""
    return {} if plan.slurm is None else {script.NAME: script.render(plan)}
