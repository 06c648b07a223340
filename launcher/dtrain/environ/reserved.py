"""The variables by which a program finds its place in the job. Their values are composed by the
other modules of `dtrain.environ` and by `dtrain.launchplan.environment`."""

from __future__ import annotations

_NUMBERS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE",
)  # fmt: skip
RESERVED = {
    **dict.fromkeys(_NUMBERS, "it follows from the hosts and their gpus"),
    "TORCHELASTIC_RUN_ID": "it names the run",
    "TORCHELASTIC_ERROR_FILE": "dtrain reads the failures that workers write there",
    "MASTER_ADDR": "it is the first host's address, which cluster.overrides can set",
    "MASTER_PORT": "job.rendezvous.port sets it",
    "TF_CONFIG": "it follows from the hosts and job.roles",
    "DTRAIN_ATTEMPT": "it counts the job's starts",
    "DTRAIN_RUN_ID": "it names the run",
    "DTRAIN_STRATEGY": "it is job.strategy",
    "DTRAIN_LAYOUT": "it is job.layout",
    "DTRAIN_TRAINING": "it is job.training",
    "DTRAIN_HOST": "it is the host's name",
    "DTRAIN_RUN_DIR": "cluster.run_dir sets it",
}
"""Variables that a cluster file may not set, and where their value comes from."""


def refusal(name: str) -> tuple[str, str]:
    """The error and the hint for a reserved variable that the user sets."""
    return f"{name} is set by dtrain for each worker", f"remove it; {RESERVED[name]}"
