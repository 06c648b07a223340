"""What a launch adds to a cluster file is held against the rules of the file."""

from __future__ import annotations

from typing import Any

import pytest

import dtrain
from dtrain.diagnostics import UsageError
from dtrain.loading import load
from dtrain.spec.secrets import secret_values

CLUSTER = {"hosts": ["a"], "gpus": 1}


def job(**keys: Any) -> dict[str, Any]:
    return {"cluster": CLUSTER, "job": {"framework": "torch", "script": "train.py", **keys}}


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"args": ["-x", "a\0b"]}, r"argument 2 has the character \\0, which no program can get"),
        ({"args": ["\ud800"]}, "no program can get"),
        ({"args": ["--lr", 3e-4]}, "argument 2 is of type float"),
        ({"env": {"N": 1}}, "the value of N is of type int"),
        ({"env": {"N": "\0"}}, "the value of N has the character .* no program can get"),
        ({"env": {"A=B": "x"}}, "'A=B' is not a variable name"),
        ({"env": {"MASTER_ADDR": "x"}}, "MASTER_ADDR is set by dtrain for each worker"),
        ({"env": {"TOKEN": "x"}}, "TOKEN is also listed in job.secrets"),
    ],
    ids=str,
)
def test_what_no_worker_can_get_is_refused(added: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(job(secrets=["TOKEN"]), **added)


@pytest.mark.parametrize("added", [{"args": ["{rank}"]}, {"env": {"N": "{local_rank}"}}], ids=str)
def test_a_placeholder_without_a_value_is_refused(added: dict[str, Any]) -> None:
    by_torchrun = job(rendezvous={"backend": "c10d"})
    with pytest.raises(UsageError, match="has no value with 'backend: c10d'"):
        load(by_torchrun, **added)
    load(job(), **added)


def test_bytes_that_are_not_utf8_and_other_braces_are_arguments() -> None:
    request = load(job(), args=["\udcff", "{", "{nope}"], env={"N": ""})
    assert request.spec().job.args == ("\udcff", "{", "{nope}")


@pytest.mark.parametrize("value", ["hush\0", 5], ids=str)
def test_a_secret_that_no_worker_can_get_is_refused_and_not_shown(value: Any) -> None:
    with pytest.raises(UsageError, match="the value of TOKEN") as refused:
        secret_values(load(job(secrets=["TOKEN"])).spec(), {"TOKEN": value})
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "no command"), (["a", "b\0"], "word 2 of the command"), ([1], "type int")],
    ids=str,
)
def test_a_command_that_no_host_can_run_is_refused(argv: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dtrain.execute(job(), argv)
