"""Runs commands within a running job of Slurm: each is a step that shares the job's resources."""

from __future__ import annotations

from dtrain.diagnostics import UsageError
from dtrain.engines.slurm.submission import login_host
from dtrain.launchplan.plan import LaunchPlan
from dtrain.node.boot import ISOLATED, boot_text
from dtrain.quoting import path, word
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from dtrain.session.relays.commands import Target
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
    plan = record.plan
    python = "python3" if login.transport == "local" else plan.agent_python(plan.hosts[0])
    return [Target(host, login, python, _srun(record.job_id, host)) for host in record.allocated]


def program_start(plan: LaunchPlan, label: str) -> str:
    """A line for ``sh`` on a machine of the job: a program of dtrain reads its stdin, in the first
    Python that can run it."""
    pythons = " ".join(str(path(each)) for each in dict.fromkeys([plan.hosts[0].python, "python3"]))
    return (
        f"for python in {pythons}; do "
        '"$python" -c "import sys; sys.exit(sys.version_info < (3, 8))" </dev/null 2>/dev/null && '
        f'exec "$python" {ISOLATED} -c {word(boot_text())} {label}; '
        'done; echo "no Python 3.8 or newer" >&2; exit 127'
    )


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
