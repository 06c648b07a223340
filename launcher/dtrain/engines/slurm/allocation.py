"""Launches inside an allocation that the user has: a shell of salloc, a batch script. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dtrain.spec.model import ClusterFile
from dtrain.wording import counted

if TYPE_CHECKING:
    from dtrain.engines.slurm.state import SlurmState

_NUMBER = re.compile(r"[0-9]{1,10}")


def current(spec: ClusterFile, environment: Mapping[str, str]) -> str | None:
    """The number of the job in whose allocation this process runs; None outside, and if the cluster
    file is not for Slurm."""
    number = environment.get("SLURM_JOB_ID", "")
    return number if spec.cluster.slurm is not None and _NUMBER.fullmatch(number) else None


def check(number: str, state: SlurmState | None, nodes: int) -> None:
    """Raises SubmitError if a job of ``nodes`` machines cannot run in the allocation."""
    # Every launch calls `current`, which needs none of it.
    from dtrain.engines.slurm.submission import SubmitError

    hint = "`env -u SLURM_JOB_ID dtrain launch ...` submits a new job instead"
    if state is None or state.final or state.queued:
        why = f"the job is {state.state}" if state is not None else "Slurm does not know the job"
    elif len(state.hosts) != nodes:
        have = len(state.hosts)
        why = f"the allocation has {counted(have, 'machine')}, and the job needs {nodes}"
        hint = f"set 'nodes: {have}', or use `salloc --nodes={nodes}`; {hint}"
    else:
        return
    raise SubmitError("this machine", f"using the allocation of job {number}", why, hint=hint)
