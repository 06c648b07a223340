"""`dtrain schema` prints a valid JSON Schema that agrees with what dtrain accepts."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dtrain.diagnostics import SpecError
from dtrain.spec.load import parse
from dtrain_cli.commands.schema import schema_json

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
GOOD = [*sorted(CONFIGS.glob("*.yaml")), HERE / "every_key.yaml"]

MINIMAL = {"cluster": {"hosts": ["a"], "gpus": 1}, "job": {"framework": "torch", "script": "t.py"}}


@pytest.fixture(scope="module")
def validator() -> Any:
    document = json.loads(schema_json())
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def editor_view(path: Path) -> Any:
    """The file roughly as an editor's YAML 1.2 parser reads it."""

    class Core(yaml.SafeLoader):
        pass

    Core.yaml_implicit_resolvers = {
        first: [rule for rule in rules if not rule[0].endswith((":timestamp", ":bool"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Core.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|false)$"), list("tf"))
    return yaml.load(path.read_text(), Core)  # noqa: S506  # a SafeLoader with fewer guesses


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_good_files_are_accepted(validator: Any, path: Path) -> None:
    assert [error.message for error in validator.iter_errors(editor_view(path))] == []


def records(node: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every object with fixed keys."""
    if isinstance(node, dict):
        if node.get("additionalProperties") is False:
            yield place
        for key, inner in node.get("properties", {}).items():
            yield from records(inner, (*place, key))


@pytest.mark.parametrize("place", list(records(json.loads(schema_json()))), ids=".".join)
def test_unknown_keys_are_refused_everywhere(validator: Any, place: tuple[str, ...]) -> None:
    document = json.loads(json.dumps(MINIMAL))
    assert validator.is_valid(document)
    record = document
    for key in place:
        record = record.setdefault(key, {})
    record["no_such_key"] = 1
    assert not validator.is_valid(document)
    with pytest.raises(SpecError, match="unknown key 'no_such_key'"):
        parse(json.dumps(document), "x.yaml")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("cluster", "gpus", -1),
        ("cluster", "gpus", "two"),
        ("cluster", "gpus", []),
        ("cluster", "hosts", []),
        ("cluster", "ssh", {"port": 70000}),
        ("cluster", "ssh", {"host_keys": "no"}),
        ("cluster", "network", {"gbps": 0}),
        ("cluster", "overrides", {"a": {"prot": 1}}),
        ("job", "framework", "flax"),
        ("job", "strategy", "fdsp"),
        ("job", "args", {"lr": 3}),
        ("job", "grace", "soon"),
        ("job", "env", {"1A": "x"}),
        ("job", "secrets", ["A", "A"]),
        ("job", "roles", {"chief": 2}),
        ("job", "layout", {"sequence_parallel": "yes"}),
    ],
)
def test_dtrain_refuses_what_an_editor_underlines(
    validator: Any, section: str, key: str, value: Any
) -> None:
    document = json.loads(json.dumps(MINIMAL))
    document[section][key] = value
    assert not validator.is_valid(document)
    with pytest.raises(SpecError):
        parse(json.dumps(document), "x.yaml")


def described(node: Any, place: str = "") -> Iterator[tuple[str, str]]:
    for key, inner in node.get("properties", {}).items():
        yield f"{place}{key}", inner.get("description", "")
        yield from described(inner, f"{place}{key}.")
    if isinstance(node.get("additionalProperties"), dict):
        yield from described(node["additionalProperties"], f"{place}*.")


def test_every_key_is_described_in_a_sentence() -> None:
    texts = dict(described(json.loads(schema_json())))
    assert "cluster.overrides.*.address" in texts
    for key, text in texts.items():
        assert len(text) > 15, key
        assert text[0].isupper(), key
        assert text.endswith("."), key


def test_the_shipped_schema_is_the_commands(golden: Callable[[str, Path], None]) -> None:
    golden(schema_json(), CONFIGS / "cluster.schema.json")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_name_their_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    prefix, _, named = first.partition("$schema=")
    assert prefix == "# yaml-language-server: "
    assert (path.parent / named).resolve() == CONFIGS / "cluster.schema.json"
