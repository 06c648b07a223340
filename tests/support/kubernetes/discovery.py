"""What a client asks to learn which kinds a server has."""

from __future__ import annotations

from support.kubernetes.kinds import KINDS, Kind, Object

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
VERSION = {
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.1",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2025-09-09T00:00:00Z",
    "goVersion": "go1.24",
    "compiler": "gc",
    "platform": "linux/amd64",
}


def answer(path: str, kinds: list[Kind] = KINDS) -> Object | None:
    """The document at a path; None if there is none."""
    parts = path.strip("/").split("/")
    groups = sorted({kind.group for kind in kinds if kind.group})
    match parts:
        case ["version"]:
            return VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["api", "v1"]:
            return _resources("v1", [kind for kind in kinds if not kind.group])
        case ["apis"]:
            found = [_group(group, kinds) for group in groups]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
        case ["apis", group] if group in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, kinds)}
        case ["apis", group, version]:
            mine = [kind for kind in kinds if (kind.group, kind.version) == (group, version)]
            return _resources(f"{group}/{version}", mine) if mine else None
        case ["openapi", "v3"]:
            versions = {
                _prefix(kind): {"serverRelativeURL": f"/openapi/v3/{_prefix(kind)}"}
                for kind in kinds
            }
            return {"paths": versions}
        case ["openapi", "v3", *rest]:
            mine = [kind for kind in kinds if _prefix(kind) == "/".join(rest)]
            return _openapi(mine) if mine else None
    return None


def _group(group: str, kinds: list[Kind]) -> Object:
    (version,) = {kind.version for kind in kinds if kind.group == group}
    named = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [named], "preferredVersion": named}


def _resources(group_version: str, kinds: list[Kind]) -> Object:
    found = [
        {
            "name": kind.plural,
            "singularName": kind.name.lower(),
            "namespaced": kind.namespaced,
            "kind": kind.name,
            "verbs": VERBS,
        }
        for kind in kinds
    ]
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version}
    return {**head, "resources": found}


def _prefix(kind: Kind) -> str:
    return f"apis/{kind.group_version}" if kind.group else "api/v1"


def _openapi(kinds: list[Kind]) -> Object:
    """Without fields. kubectl looks for the parameters of a request, and leaves the validation of
    fields to a server that has `fieldValidation`."""
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string"}}
        for name in ("dryRun", "fieldManager", "fieldValidation")
    ]
    paths, schemas = {}, {}
    for kind in kinds:
        named = [{"group": kind.group, "version": kind.version, "kind": kind.name}]
        at = f"/{_prefix(kind)}/{'namespaces/{namespace}/' * kind.namespaced}{kind.plural}"
        for path, verb, action in ((at, "post", "post"), (f"{at}/{{name}}", "patch", "patch")):
            operation = {
                "x-kubernetes-group-version-kind": named[0],
                "x-kubernetes-action": action,
                "parameters": parameters,
                "responses": {"200": {"description": "OK"}},
            }
            paths[path] = {verb: operation}
        schemas[kind.name] = {"type": "object", "x-kubernetes-group-version-kind": named}
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
