"""Any text results in a ClusterFile or a SpecError, quickly."""

import copy
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.diagnostics import SpecError
from dtrain.spec.load import parse
from dtrain.spec.model import ClusterFile
from dtrain.spec.report import render_problems
from dtrain.spec.source import MAX_SIZE

HERE = Path(__file__).parent
SEEDS = [
    path.read_text()
    for path in [*sorted((HERE.parents[1] / "configs").glob("*.yaml")), HERE / "every_key.yaml"]
]
PIECES = [
    *"[]{}:,#&*!|>'\"%@`-?~<\\\t\n\r\0 \x85\u2028\ufeff\ud800é",
    *["<<: *a", "&a ", "*a", "- ", "? ", ": ", "---\n", "...\n", "!!int ", "!x ", "%YAML 1.1\n"],
    *["null", "yes", "010", "1e-5", "-1", ".inf", "''", '""', "[1-3]", "gpu[1-99999]", "\\U"],
    *[
        "gpus",
        "hosts",
        "env",
        "roles",
        "ps: 1",
        "layout",
        "RANK",
        "  ",
        "\n\n",
        "|\n",
        "tensorflow",
    ],
]


def outcome(source: str | bytes) -> ClusterFile | SpecError:
    try:
        return parse(source, "x.yaml")
    except SpecError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.position is not None
            assert problem.position.line >= 1
            assert problem.position.column >= 1
            assert problem.width >= 1
        places = [(p.position.line, p.position.column) for p in error.problems if p.position]
        assert places == sorted(places)
        report = render_problems(error)
        assert report.replace("\n", "").isprintable()
        return error


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys and numbers of items that lead to each value in a document."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        yield (*above, key)
        yield from paths(one, (*above, key))


EVERY_KEY = yaml.safe_load((HERE / "every_key.yaml").read_text())


@pytest.mark.parametrize("kind", [None, {"a": "b"}, ["x"], ["ro"]], ids=repr)
def test_any_kind_of_value_for_each_key(kind: object) -> None:
    for *above, last in paths(EVERY_KEY):
        document = holder = copy.deepcopy(EVERY_KEY)
        for key in above:
            holder = holder[key]
        holder[last] = kind
        outcome(json.dumps(document))


@given(st.text() | st.binary() | st.text(st.sampled_from("[]{}:,-&*!|>'\"%@?# \nab<1")))
@settings(max_examples=300, deadline=None)
def test_any_text(source: str | bytes) -> None:
    outcome(source)


@given(
    st.sampled_from(SEEDS),
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 20),
            st.sampled_from(PIECES) | st.text(max_size=3),
        ),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_damaged_file(seed: str, edits: list[tuple[float, int, str]]) -> None:
    for where, dropped, piece in edits:
        at = int(where * len(seed))
        seed = seed[:at] + piece + seed[at + dropped :]
    outcome(seed)


@given(st.sampled_from(SEEDS), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_file_with_shuffled_values(seed: str, random: object) -> None:
    lines = [line for line in seed.splitlines() if ": " in line]
    values = [line.split(": ", 1)[1] for line in lines]
    random.shuffle(values)  # type: ignore[attr-defined]
    outcome("\n".join(f"{a.split(': ', 1)[0]}: {b}" for a, b in zip(lines, values, strict=True)))
    outcome(seed.replace(lines[0], f"{lines[0].split(':')[0]}: {values[0]}"))


HEADER = "job: {framework: torch, script: t.py}\n"
ABSURD = {
    "brackets": "[" * MAX_SIZE,
    "braces": "{" * (MAX_SIZE // 2),
    "open-braces-with-keys": "{a: " * (MAX_SIZE // 4),
    "dashes": "- " * (MAX_SIZE // 2),
    "questions": "? " * (MAX_SIZE // 2),
    "anchors": "&a " * (MAX_SIZE // 3),
    "newlines": "\n" * MAX_SIZE,
    "spaces": " " * MAX_SIZE,
    "one-word": "x" * MAX_SIZE,
    "one-key": "x" * (MAX_SIZE - 10) + ": 1",
    "one-quote": "'" + "x " * (MAX_SIZE // 2 - 10),
    "unknown-keys": "".join(f"key{n}: 1\n" for n in range(60000)),
    "bad-bytes": b"\xff" * MAX_SIZE,
    "hosts": "cluster: {gpus: 1, hosts: [" + "'a[1-16384]'," * 5000 + "]}\n" + HEADER,
    "hosts-full": "cluster: {gpus: 1, hosts: 'a[1-16384]'}\n" + HEADER,
    "overrides": "cluster:\n  gpus: 1\n  hosts: 'a[1-16384]'\n  overrides:\n"
    + "".join(f"    a[{n}-16384]: {{gpus: 2}}\n" for n in range(1, 5000))
    + HEADER,
    "unknown-overrides": "cluster:\n  gpus: 1\n  hosts: 'a[1-8000]'\n  overrides:\n"
    + "".join(f"    b[{n}]: {{gpus: 2}}\n" for n in range(1, 9000))
    + HEADER,
    "overridden-everywhere": "cluster:\n  gpus: 1\n  hosts: 'a[1-16384]'\n  overrides:\n"
    "    a[1-16384]: {env: {RANK: 1}, slots: 2, user: x, ssh: {user: y}}\n" + HEADER,
    "merges": "a: &a {"
    + ",".join(f"k{n}: 1" for n in range(200))
    + "}\nb: {<<: ["
    + ",".join(["*a"] * 20000)
    + "]}\n",
    **{
        f"aliases in {key}": "x0: &x0 [a, a]\n"
        + "".join(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]\n" for n in range(1, 60))
        + f"cluster: {{hosts: [a]}}\njob: {{framework: torch, script: t.py, {key}: *x59}}\n"
        for key in ("args", "env", "setup", "nothing")
    },
    "one long text, often": "cluster: {gpus: 1, hosts: [a]}\n"
    f"job: {{framework: torch, script: t.py, args: [&a {'x' * (MAX_SIZE // 2)}"
    + ", *a" * 40_000
    + "]}\n",
    "a circle": "cluster: &c {hosts: [a], overrides: *c}\njob: &j {env: *j, args: [*j]}\n",
    "nested-merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], k{n}: 1}}\n" for n in range(1, 40)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ABSURD)
def test_hostile_files_are_cheap(name: str) -> None:
    start = time.process_time()
    result = outcome(ABSURD[name])
    assert time.process_time() - start < 60
    assert isinstance(result, SpecError) == (name != "hosts-full")
