"""What a launch adds to a cluster file is held against the rules of the file."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.diagnostics import UsageError
from dtrain.loading import load

CLUSTER = {"hosts": ["a"], "gpus": 1}


def job(**keys: Any) -> dict[str, Any]:
    return {"cluster": CLUSTER, "job": {"framework": "torch", "script": "train.py", **keys}}


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"args": ["a\0b"]}, r"the argument 'a\\0b' has \\0, which no program can get"),
        ({"args": ["\ud800"]}, "no program can get"),
        ({"args": ["--lr", 3e-4]}, "the argument 0.0003 is not a string"),
        ({"env": {"N": 1}}, "the value of N, 1 is not a string"),
        ({"env": {"N": "\0"}}, "the value of N, .* no program can get"),
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
