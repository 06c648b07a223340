"""The fields of each kind and their types, from the models of published packages."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jsonschema

from support.kubernetes.errors import ApiError, invalid
from support.kubernetes.kinds import JOB, JOBSET, POD, RUNTIME, TRAINJOB, Kind, Object


@functools.cache
def schema(kind: Kind) -> Object | None:
    """A JSON schema that refuses unknown fields; None for a kind without a model."""
    model = _model(kind)
    if model is None:
        return None
    found: Object = copy.deepcopy(model.model_json_schema(by_alias=True))
    definitions = found.get("$defs", {})
    for name, definition in [*definitions.items(), (kind.name, found)]:
        fields = definition.get("properties", {})
        if "actual_instance" in fields:  # a union, such as a quantity
            definition.clear()
            definition["type"] = ["integer", "number", "string"]
        elif fields and not name.endswith("V1Time"):
            definition["additionalProperties"] = False
    return found


def _model(kind: Kind) -> Any:
    from kubeflow_trainer_api import models

    names = {
        JOBSET: "JobsetV1alpha2JobSet",
        TRAINJOB: "TrainerV1alpha1TrainJob",
        RUNTIME: "TrainerV1alpha1ClusterTrainingRuntime",
        JOB: "IoK8sApiBatchV1Job",
        POD: "IoK8sApiCoreV1Pod",
    }
    name = names.get(kind, f"IoK8sApiCoreV1{kind.name}" if not kind.group else "")
    return getattr(models, name, None)


def check(kind: Kind, wanted: Object, *, strict: bool) -> None:
    """Raises ApiError where a field is unknown (if ``strict``) or has a wrong type."""
    rules = schema(kind)
    if rules is None:
        return
    unknown, wrong = [], []
    for error in jsonschema.Draft202012Validator(rules).iter_errors(without_nulls(wanted)):
        for leaf in _leaves(error):
            path = _path(leaf.absolute_path)
            if leaf.validator == "additionalProperties":
                known = leaf.schema["properties"]
                unknown += [
                    f'unknown field "{path}{name}"' for name in leaf.instance if name not in known
                ]
            elif leaf.validator == "required":
                field = leaf.message.split("'")[1]
                wrong.append(f"{path}{field}: Required value")
            else:
                wrong.append(f"{path[:-1]}: Invalid value: {leaf.message}")
    if unknown and strict:
        message = f"strict decoding error: {', '.join(sorted(set(unknown)))}"
        raise ApiError(400, "BadRequest", message)
    if wrong:
        raise invalid(kind, wanted["metadata"].get("name", ""), sorted(set(wrong)))


def _leaves(error: Any) -> list[Any]:
    """The errors inside `anyOf: [X, null]` which are about X."""
    if not error.context:
        return [error]
    inner = [one for one in error.context if one.schema.get("type") != "null"]
    return [leaf for one in inner for leaf in _leaves(one)]


def _path(parts: Any) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"{text.lstrip('.')}." if text else ""


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value
