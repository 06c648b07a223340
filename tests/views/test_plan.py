"""The text of a dry run."""

from __future__ import annotations

import pytest

from dtrain.launchplan.build import build
from dtrain.spec.load import parse
from dtrain_cli.views.plan import as_text

FILE = """
cluster:
  hosts: [{hosts}]
  gpus: 1
  overrides: {overrides}
job: {{framework: torch, script: t.py}}
"""


@pytest.mark.parametrize(
    ("hosts", "overrides", "heads"),
    [
        # Each host but the first dials the first: its first block is another.
        ("a, b, c", "{}", ["a", "b", "c"]),
        ("ann, bob, cid, dot, eve", "{}", ["ann", "bob", "cid,dot", "eve"]),
        ("'n[1-9]'", "{}", ["n1", "n2", "n[3-8]", "n9"]),
        ("'n[1-9]'", "{'n[1-5]': {gpus: 2}}", ["n1", "n2", "n[3-4]", "n5", "n6", "n[7-8]", "n9"]),
        ("'n[1-5]'", "{n3: {env: {A: 1}}}", ["n1", "n2", "n3", "n4", "n5"]),
    ],
)
def test_only_hosts_that_count_on_are_folded(hosts: str, overrides: str, heads: list[str]) -> None:
    text = as_text(build(parse(FILE.format(hosts=hosts, overrides=overrides).encode(), "f.yaml")))
    assert [line.split()[0] for line in text.splitlines() if "  node rank " in line] == heads


def test_an_argument_of_thousands_of_digits() -> None:
    digits = "9" * 10_000
    file = f"cluster: {{hosts: [a], gpus: 1}}\njob: {{framework: torch, script: '{digits}'}}\n"
    assert digits in as_text(build(parse(file.encode(), "f.yaml")))
