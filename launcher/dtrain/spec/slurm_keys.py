"""The keys below `cluster.slurm`: what a job asks of Slurm."""

from __future__ import annotations

import re

from dtrain.spec import value_rules as rules
from dtrain.spec.scalars import Duration, Integer, Text
from dtrain.spec.schema import Field, SectionType
from dtrain.spec.words import Words

_NAMES = rules.pattern_text(
    r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*", "must be one name, or several with commas"
)
_constraint = rules.matching(
    r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:@+()\[\]&|*!-]*", "must be features such as a100 or a100&nvme"
)

OWN_OPTIONS = {
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node"), "cluster.nodes and cluster.gpus"
    ),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gres"), "cluster.gpus"),
    "cpus-per-task": "cluster.slurm.cpus",
    **{
        name: f"cluster.slurm.{name}"
        for name in ("partition", "account", "qos", "constraint", "reservation", "time")
    },
    **dict.fromkeys(("requeue", "no-requeue"), "job.restart.max"),
    "signal": "job.grace",
    "job-name": "name",
    "chdir": "job.workdir",
    "export": "job.env and job.secrets",
    **dict.fromkeys(("cluster", "clusters"), "cluster.slurm.login"),
    **dict.fromkeys(("array", "wrap", "wait", "test-only"), ""),
}
"""Options of sbatch that ``options`` may not repeat, and the keys that set them."""


def _option(text: str) -> str:
    name, _, _ = text.removeprefix("--").partition("=")
    if not re.fullmatch(r"--[a-z][a-z-]*", f"--{name}") or not text.startswith("--"):
        return "must be a long option of sbatch with its value, such as --mem=0"
    if not text.isprintable():
        return "must be printable text on one line"
    # sbatch accepts the first letters of a long option.
    own = next((one for one in OWN_OPTIONS if one.startswith(name)), None)
    if own is not None:
        key = OWN_OPTIONS[own]
        if key:
            return f"cannot contain --{name}: set {key} instead"
        why = "dtrain submits a script of its own, and follows the job"
        if own == "array":
            why = "a launch is one job; `launch --dry-run` writes a script for your own sbatch"
        return f"cannot contain --{name}: {why}"
    return ""


SLURM = SectionType(
    {
        "partition": Field(
            _NAMES,
            "Partition, or several with commas.",
            otherwise="the cluster's default partition",
            example="gpu",
        ),
        "account": Field(
            _NAMES,
            "Account that the job is charged to.",
            otherwise="your default account",
            example="ml",
        ),
        "qos": Field(
            _NAMES, "Quality of service.", otherwise="the account's default", example="high"
        ),
        "constraint": Field(
            Text(_constraint),
            "Features that the machines must have.",
            otherwise="none",
            example="a100&nvme",
        ),
        "reservation": Field(
            _NAMES, "Reservation to run in.", otherwise="none", example="maintenance"
        ),
        "time": Field(
            Duration(60),
            "Time limit of the job. Workers get TERM before it ends.",
            otherwise="the partition's default",
            example="2d",
        ),
        "gpu_type": Field(
            _NAMES, "Type of the GPUs, as `sinfo -o %G` shows it.", otherwise="any", example="a100"
        ),
        "cpus": Field(
            Integer(1, 4096),
            "CPUs of each process.",
            otherwise="the processes share the job's CPUs on their machine",
            example="12",
        ),
        "login": Field(
            Text(rules.option_safe),
            "Login host where dtrain submits the job, over SSH.",
            otherwise="this machine",
            example="login01",
        ),
        "options": Field(
            Words(Text(_option)),
            "Further options of sbatch, as a list or a string (see job.command).",
            otherwise="none",
            example='["--exclusive", "--mem=0"]',
        ),
    }
)
