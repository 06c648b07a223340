"""Label and field selectors."""

from __future__ import annotations

import re

from support.kubernetes.kinds import Object


def matches(found: Object, labels: str, fields: str) -> bool:
    mine = found["metadata"].get("labels", {})
    return all(_label(mine, one) for one in _split(labels)) and all(
        _field(found, one) for one in _split(fields)
    )


def _split(selector: str) -> list[str]:
    """At the commas outside parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def _label(labels: Object, term: str) -> bool:
    if found := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", term):
        values = [value.strip() for value in found[3].split(",")]
        return (labels.get(found[1]) in values) == (found[2] == "in")
    if found := re.fullmatch(r"([^!=\s]+)\s*(!=|==?)\s*(\S*)", term):
        return (labels.get(found[1]) == found[3]) == (found[2] != "!=")
    return term[1:] not in labels if term.startswith("!") else term in labels


def _field(found: Object, term: str) -> bool:
    path, sign, value = re.split(r"(!=|==?)", term, maxsplit=1)
    here: object = found
    for name in path.split("."):
        here = here.get(name, "") if isinstance(here, dict) else ""
    return (str(here) == value) == (sign != "!=")
