"""The orders for the Slurm program on a login node. `dtrain.node.slurm.orders` documents them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import PurePosixPath

from dtrain.diagnostics import NodeError
from dtrain.engines.slurm.script import batch_options, render
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages import slurm as messages
from dtrain.node.runtime_archive import runtime_archive
from dtrain.node.slurm.orders import SlurmJobOrder, Submission
from dtrain.runs.record import Record
from dtrain.spec.model import Host, Slurm


class SubmitError(NodeError):
    """Slurm, or the login node, did not accept the job."""


POLICY = "job violates accounting/qos policy (job submit limit, user's size and/or time limits)"
"""What sbatch says about each limit. The name of the limit comes before it."""
_HINTS = {
    POLICY: "ask for less, or wait until other jobs end: `squeue --user=$USER` lists yours;"
    " `sacctmgr show qos` and `sacctmgr show associations user=$USER` show the limits",
    "account": "`sacctmgr show associations user=$USER` lists your accounts; set"
    " cluster.slurm.account",
    "partition": "`sinfo` lists the partitions; set cluster.slurm.partition",
    "qos": "`sacctmgr show qos` lists them; set cluster.slurm.qos",
    "node configuration is not available": "no machine of the partition has so many GPUs, CPUs or"
    " so much memory; `sinfo -o '%P %D %G %c %m'` shows what they have",
    "time limit": "`sinfo -o '%P %l'` shows the partitions' limits; set cluster.slurm.time",
    "invalid feature": "`sinfo -o '%P %f'` lists the features; set cluster.slurm.constraint",
    "reservation": "`scontrol show reservation` lists them; set cluster.slurm.reservation",
    "unrecognized option": "`sbatch --help` lists the options; correct cluster.slurm.options",
    "authentication error": "munge does not run there, or the clocks of the machines differ;"
    " `munge -n | unmunge` shows it",
    "no space left": "free some space there, or set cluster.run_dir to another shared folder",
    "unable to contact": "the controller is down or cannot be reached; `scontrol ping` shows it",
    "temporarily unable": "Slurm has as many jobs as its configuration allows (MaxJobCount), or is"
    " busy; launch again later",
    **dict.fromkeys(
        ("no answer within", "timed out"),
        "the controller is slow; `squeue --user=$USER` shows if the job exists",
    ),
}
_NO_SLURM = ("not found", "configuration source", "unable to process configuration")
"""In what a command says on a machine without Slurm's commands, or without its configuration."""
_NO_ANSWER = ("unable to contact", "no answer within", "timed out")
"""In what a command says if the controller does not answer."""
HERE = "this machine"


def login_host(slurm: Slurm) -> Host:
    """Where Slurm's commands run."""
    if slurm.login is None:
        return Host(HERE, "127.0.0.1", transport="local")
    return Host(slurm.login, slurm.login)


def is_absent(said: str) -> bool:
    """Whether a command says that the machine has no Slurm, or does not know its cluster."""
    return any(words in said.lower() for words in _NO_SLURM)


def is_unanswered(said: str) -> bool:
    """Whether a command says nothing about the job, because it has not reached a controller."""
    return is_absent(said) or any(words in said.lower() for words in _NO_ANSWER)


def hint_for(said: str, host: str) -> str:
    """The remedy for what a command of Slurm says about a failure on a login host; empty if it is
    unknown."""
    if is_absent(said):
        if host == HERE:
            return "run dtrain on a login node, or name one: cluster.slurm.login"
        return (
            f"check that `ssh {host} sinfo` works: name another cluster.slurm.login, or extend the"
            " PATH in ~/.bashrc there"
        )
    said = said.lower()
    return next((hint for word, hint in _HINTS.items() if word in said), "")


def refusal(host: str, said: messages.SubmitRefused) -> SubmitError:
    """The error for a submission that Slurm refused, with its own words."""
    reason = said.text
    hint = said.hint or hint_for(said.text, host)
    if said.command:
        reason += f"\nthe command, which ended with status {said.status}: {said.command}"
    if said.command and not is_unanswered(said.text):
        hint = f"{hint}\n`dtrain check FILE` compares the file with the partition".lstrip()
    return SubmitError(host, "submitting the job", reason, hint=hint)


def submit_order(
    record: Record, plan: LaunchPlan, workdir: str, known_secrets: Mapping[str, str]
) -> Submission:
    """``known_secrets`` has the secrets of the job, and others, which the job must not get."""
    secrets, code = plan.job.secrets, plan.code_folder
    return {
        "op": "submit",
        **job_order(record),
        "trust_group": plan.trust_group,
        "workdir": workdir,
        "code": None if code is None else str(PurePosixPath(plan.hosts[0].workdir, code)),
        "script": render(plan, in_allocation=record.request.allocation is not None),
        "options": list(batch_options(plan)),
        "runtime": base64.b64encode(runtime_archive()).decode(),
        "environment": {name: known_secrets[name] for name in secrets},
        "hidden": [name for name in known_secrets if name not in secrets],
    }


def job_order(record: Record) -> SlurmJobOrder:
    allocation = record.request.allocation
    return {"run": record.run, "run_dir": record.plan.run_dir, "allocation": allocation}
