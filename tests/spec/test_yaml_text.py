"""Values as the text of a YAML file."""

from __future__ import annotations

import pytest
import yaml

from dtrain.spec.yaml_text import literal


@pytest.mark.parametrize(
    "text",
    ["3d", "1f1b", "a100-80gb", "train.py", "./train.py", "../x", "~/runs", "/shared/x", "_a", "."],
)
def test_plain_text_has_no_quotes(text: str) -> None:
    assert literal(text) == text
    assert yaml.safe_load(literal(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "yes", "No", "null", "~", "12", "08", ".5", ".inf", "1e5", "0x1f", "2026-01-01", "a b",
     "it's #1.py", "a: b", "-x", "[a]"],
)  # fmt: skip
def test_other_text_stays_text(text: str) -> None:
    assert literal(text).startswith('"')
    assert yaml.safe_load(literal(text)) == text


def test_a_single_quote_is_kept() -> None:
    assert literal("it's", "'") == "'it''s'"
    assert literal("ddp", '"') == '"ddp"'


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (8, "8")])
def test_other_values(value: object, text: str) -> None:
    assert literal(value) == text
