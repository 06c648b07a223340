"""Checks what a launch adds to a cluster file: arguments and variables of the command line or of
`dtrain.launch`. The rules are those of the file. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dtrain.diagnostics import UsageError
from dtrain.environ.reserved import RESERVED, refusal
from dtrain.spec.model import Job
from dtrain.spec.placeholders import missing_value, without_value
from dtrain.spec.problems import shown, visible
from dtrain.spec.value_rules import variable

_UNUSABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""A program gets bytes. Python's ``\\udc80`` to ``\\udcff`` stand for those that are not UTF-8."""


def check_additions(job: Job, args: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise UsageError for an argument or a variable that the workers of ``job`` cannot get."""
    for text in args:
        _check_text(job, text, "the argument")
    for name, text in env.items():
        _check_text(job, name, "the variable")
        if fault := variable(name):
            raise UsageError(f"{shown(name)} {fault}")
        if name in RESERVED:
            message, hint = refusal(name)
            raise UsageError(message, hint=hint)
        if name in job.secrets:
            raise UsageError(f"{name} is also listed in job.secrets", hint="keep one of the two")
        _check_text(job, text, f"the value of {name},")


def _check_text(job: Job, text: str, what: str) -> None:
    if not isinstance(text, str):
        raise UsageError(f"{what} {text!r} is not a string", hint=f"write {str(text)!r}")
    if found := _UNUSABLE.search(text):
        character = visible(found[0])
        raise UsageError(f"{what} {shown(text)} has {character}, which no program can get")
    backend = job.rendezvous.backend
    if missing := missing_value(text, job.framework, backend):
        message, hint = without_value(missing, backend)
        raise UsageError(message, hint=hint)
