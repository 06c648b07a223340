"""What an engine runs, as text, for an engine that takes a whole job."""

from __future__ import annotations

from dtrain.engines.slurm import script
from dtrain.launchplan.plan import LaunchPlan


def batch_script(plan: LaunchPlan) -> dict[str, str]:
    """The engine's job by its file name: a batch script or a manifest. Empty for SSH, which needs
    none."""
    if plan.slurm is not None:
        return {script.NAME: script.render(plan)}
    if plan.kubernetes is not None:
        from dtrain.engines.kubernetes import manifest

        return {manifest.NAME: manifest.render(plan)}
    return {}
