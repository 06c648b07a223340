"""Checks what a launch adds to a cluster file: arguments and variables of the command line or of
`dtrain.launch`. The rules are those of the file. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dtrain.diagnostics import UsageError
from dtrain.spec.model import Job
from dtrain.spec.placeholders import missing_value, without_value
from dtrain.spec.problems import shown, visible
from dtrain.spec.value_rules import variable
from dtrain.spec.variables import RESERVED, refusal

_UNUSABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""A program gets bytes. Python's ``\\udc80`` to ``\\udcff`` stand for those that are not UTF-8."""


def check_additions(job: Job, args: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise UsageError for an argument or a variable that the workers of ``job`` cannot get."""
    for number, text in enumerate(args, 1):
        check_text(text, f"argument {number}")
        _check_placeholders(job, text)
    for name, text in env.items():
        check_text(name, f"the variable {name!r}")
        if fault := variable(name):
            raise UsageError(f"{shown(name)} {fault}")
        if name in RESERVED:
            message, hint = refusal(name)
            raise UsageError(message, hint=hint)
        if name in job.secrets:
            raise UsageError(f"{name} is also listed in job.secrets", hint="keep one of the two")
        check_text(text, f"the value of {name}")
        _check_placeholders(job, text)


def check_text(text: object, what: str) -> None:
    """Raise UsageError unless a program can get ``text``. ``what``: how to call it in the error,
    which does not contain it: it may be a secret."""
    if not isinstance(text, str):
        raise UsageError(
            f"{what} is of type {type(text).__name__}", hint="pass a string: str(value)"
        )
    if found := _UNUSABLE.search(text):
        raise UsageError(f"{what} has the character {visible(found[0])}, which no program can get")


def _check_placeholders(job: Job, text: str) -> None:
    backend = job.rendezvous.backend
    if missing := missing_value(text, job.framework, backend):
        message, hint = without_value(missing, backend)
        raise UsageError(message, hint=hint)
