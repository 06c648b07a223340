"""Makes the request for a job: from a cluster file, or from a mapping with the same keys."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dtrain.diagnostics import UsageError

if TYPE_CHECKING:
    from dtrain.runs.request import Request

SPEC_NAME = "spec.json"
"""The name in messages of a spec that was built in Python."""


Spec: TypeAlias = "Request | str | os.PathLike[str] | Mapping[str, Any]"
"""The job: the path of a cluster file, its content as dicts and lists, or the result of `load`."""


def load(
    spec: Spec,
    *,
    folder: str | os.PathLike[str] = ".",
    settings: Sequence[str] = (),
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Request:
    """Read and validate a cluster file, or a mapping with the same keys.

    ``folder`` is the base of relative paths in a mapping. ``settings`` replace values of the
    content: ``job.restart.max=3`` as after ``--set`` on the command line. ``args`` are appended to
    ``job.args``, and ``env`` overrides ``job.env``. Raises SpecError with all problems if the
    content is invalid, and UsageError if it cannot be read or ``args`` or ``env`` are invalid.
    """
    from dtrain.runs.request import Request
    from dtrain.spec.additions import check_additions

    refuse_text("settings", settings, split=False)
    refuse_text("args", args)
    if isinstance(spec, Request):
        request = spec
    elif isinstance(spec, Mapping):
        request = Request(SPEC_NAME, str(Path(folder).absolute()), _text(spec))
    else:
        request = Request.of(Path(spec))
    args = (*request.args, *args)
    env = {**(request.env or {}), **(env or {})}
    request = replace(request, settings=(*request.settings, *settings), args=args, env=env)
    check_additions(request.spec().job, args, env)
    return request


def refuse_text(name: str, given: Sequence[str], *, split: bool = True) -> None:
    """Raise UsageError for one text in place of a list of them: each character would be one.
    ``split``: whether its words are the items to suggest; else it is one item."""
    if isinstance(given, str):
        items = given.split() if split else [given]
        raise UsageError(f"{name} must be a list, not {given!r}", hint=f"{name}={items!r}")


def load_torch_hosts(file: Path | None, settings: Sequence[str], option: str, verb: str) -> Request:
    """The cluster file for an ``option`` of the planner that runs torch on its hosts; ``verb`` says
    what it does there. Raises UsageError if it cannot."""
    if file is None:
        raise UsageError(f"`{option}` needs machines, but no file names them", hint="add FILE")
    found = load(file, settings=settings)
    spec = found.spec()
    if spec.cluster.allocated:
        raise UsageError(
            f"`{option}` needs hosts by name, but an engine chooses them",
            hint="use `calibrate_run` with a run on them, or a copy of the file with cluster.hosts",
        )
    if spec.job.framework != "torch":
        raise UsageError(
            f"`{option}` {verb}s with torch, but job.framework is {spec.job.framework}",
            hint=f"leave `{option}` out",
        )
    if spec.job.container is not None:
        raise UsageError(
            f"`{option}` does not {verb} in containers",
            hint="use `calibrate_run` with a run in them, or a copy of the file without "
            "job.container",
        )
    return found


def _text(spec: Mapping[str, Any]) -> str:
    """The spec as JSON: YAML in which all strings are quoted, so "on" and "1e3" stay strings."""
    try:
        return json.dumps(spec, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the spec has a value that a cluster file cannot have: {error}",
            hint="use dicts, lists, strings, numbers, booleans and None",
        ) from None


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it has a value of type {type(value).__name__}")
