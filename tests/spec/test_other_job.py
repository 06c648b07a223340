"""A cluster file with another job on the same hosts."""

from __future__ import annotations

from dtrain.spec.load import parse
from dtrain.spec.other_job import with_job

TEXT = """
name: mine
cluster: &all
  hosts: [a, "b"]
  gpus: 0
  slots: 2
  ssh: {user: "ops", port: 2222}
  network: {gbps: 1e2}
  overrides:
    a: {env: {FLAG: on, NUMBER: 010, ZERO: 1.10, EMPTY: "", TEXT: "1", YES: 'true'}}
notify: {command: [mail]}
job:
  framework: torch
  script: train.py
  args: [--data, "$HOME"]
  env: {MODE: "a: 'b' {rank}", N: 3}
  setup: |
    source env.sh
    ulimit -n 65536
  rendezvous: {ports: 40000-40099}
  restart: {max: 3}
"""
JOB = {"framework": "torch", "module": "dtrain.runtime.torch.trial", "args": ['{"model": {}}']}


def test_hosts_and_environment_stay() -> None:
    settings = ("cluster.spares=[c]", "job.env.N=null")
    before = parse(TEXT, "cluster.yaml", settings)
    keep = ("env", "setup", "workdir", "rendezvous")
    text = with_job(TEXT, settings, JOB, keep=keep, name="trial")
    after = parse(text, "trial")
    assert after.cluster == before.cluster
    assert after.name == "trial"
    assert (after.job.env, after.job.setup) == (before.job.env, before.job.setup)
    assert after.job.rendezvous == before.job.rendezvous
    assert after.job.module == JOB["module"]
    assert after.job.args == tuple(JOB["args"])
    # The rest is of the other job alone.
    assert after.job.script is None
    assert after.job.restart.max == 0
    assert after.notify is None


def test_empty_sections_unusual_numbers_and_emoji_stay_valid() -> None:
    text = (
        "cluster: {hosts: [a], gpus: 1, ssh: {port: +22}, overrides: }\n"
        "job:\n  framework: torch\n  script: t.py\n  env:\n  setup: ['echo 😀']\n"
    )
    new = with_job(
        text, (), {"framework": "torch", "script": "x.py"}, keep=("env", "setup"), name="n"
    )
    file = parse(new, "new.yaml")
    assert file.job.setup == ("echo 😀",)
    assert file.cluster.hosts[0].ssh.port == 22
