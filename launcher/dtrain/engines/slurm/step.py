"""Runs commands within a running job of Slurm: each is a step that shares the job's resources."""

from __future__ import annotations

from dtrain.diagnostics import UsageError
from dtrain.engines.slurm.submission import login_host
from dtrain.runs.record import Record, Request
from dtrain.session.commands import Target
from dtrain.spec.model import Slurm


def targets(request: Request, record: Record | None) -> list[Target]:
    """The hosts of a job. All steps start from the login node, or from this machine.

    Raises UsageError if Slurm has not chosen the hosts yet.
    """
    if record is None:
        raise UsageError(
            f"{request.file}: Slurm chooses its hosts when the job starts",
            hint="name a run instead; `dtrain ps` lists the runs",
        )
    if record.job_id is None or not record.allocated:
        raise UsageError(
            f"run {record.run} has no hosts yet", hint=f"`dtrain ps {record.run}` shows its state"
        )
    login = login_host(request.spec().cluster.slurm or Slurm())
    plan = record.plan()
    python = "python3" if login.transport == "local" else plan.agent_python(plan.hosts[0])
    return [Target(host, login, python, _srun(record.job_id, host)) for host in record.allocated]


def _srun(job: str, host: str) -> tuple[str, ...]:
    """`--overlap` shares the CPUs and GPUs of the running workers. Without `--export`, Slurm would
    pass on the environment of the program on the login node."""
    return (
        "srun",
        f"--jobid={job}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--quiet",
        "--export=HOME,USER,LOGNAME,SHELL,PATH,LANG",
        "--",
    )
