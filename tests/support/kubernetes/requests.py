"""Requests for objects: paths, verbs, and what each verb does."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import dataclass
from typing import Any

import yaml

from support.kubernetes import admission
from support.kubernetes.access import Access
from support.kubernetes.deletion import delete
from support.kubernetes.errors import ApiError
from support.kubernetes.kinds import ACCESS, NAMESPACE, SECRET, Kind, Object
from support.kubernetes.schema import without_nulls
from support.kubernetes.selectors import matches
from support.kubernetes.store import Store

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True)
class Target:
    kind: Kind
    namespace: str
    name: str
    sub: str


def parse(path: str, kinds: list[Kind]) -> Target:
    """Raises ApiError 404."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:2]), parts[3:])
    version = "/".join(parts[1:2] if parts[0] == "api" else parts[2:3])
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    for kind in kinds:
        if rest and (kind.group, kind.version, kind.plural) == (group, version, rest[0]):
            name, sub = [*rest[1:], "", ""][:2]
            return Target(kind, namespace if kind.namespaced else "", name, sub)
    raise ApiError(404, "NotFound", "the server could not find the requested resource")


def verb(method: str, target: Target, query: Object) -> str:
    if method == "GET":
        watches = query.get("watch") in ("1", "true")
        return "watch" if watches else "get" if target.name else "list"
    if method == "DELETE":
        return "delete" if target.name else "deletecollection"
    return VERBS[method]


def answer(
    store: Store,
    access: Access,
    verb: str,
    target: Target,
    query: Object,
    body: bytes,
    media: str,
) -> object:
    """The document to answer, or its status code and it. Raises ApiError."""
    kind, namespace, name = target.kind, target.namespace, target.name
    strict = query.get("fieldValidation", "Strict") == "Strict"
    if verb == "get":
        return store.get(kind, namespace, name)
    if verb == "list":
        return _list(store, target, query)
    if verb == "delete":
        return delete(store, kind, namespace, name, _options(query, body))
    if verb == "deletecollection":
        gone = _list(store, target, query)
        for one in gone["items"]:
            delete(store, kind, namespace, one["metadata"]["name"], _options(query, body))
        return gone
    sent = _parsed(body, media)
    if kind == ACCESS:
        return 201, _review(access, sent)
    if verb == "create":
        return 201, _create(store, target, sent, query, strict=strict)
    with store.changed:
        found = store.find(kind, namespace, name)
        if found is None and "apply-patch" in media:
            return 201, _create(store, target, sent, query, strict=strict)
        before = store.get(kind, namespace, name)
        after = sent if verb == "update" else merge(before, sent, lists="strategic" in media)
        after = _normal(kind, {**before, **after})
        admission.admit_update(kind, before, after, strict=strict)
        if query.get("dryRun"):
            return after
        return store.edit(kind, namespace, name, lambda stored: stored.update(after))


def _create(store: Store, target: Target, sent: Object, query: Object, *, strict: bool) -> Object:
    kind = target.kind
    meant = (sent.get("apiVersion") or kind.group_version, sent.get("kind") or kind.name)
    if meant != (kind.group_version, kind.name):
        message = f"the object {meant} does not match the type {kind.group_version} {kind.name}"
        raise ApiError(400, "BadRequest", message)
    meta = sent.setdefault("metadata", {})
    if kind.namespaced:
        meta["namespace"] = target.namespace
        store.get(NAMESPACE, "", target.namespace)
    sent = _normal(kind, sent)
    sent.pop("status", None)
    admission.admit(store, kind, sent, strict=strict)
    if query.get("dryRun"):
        scratch = Store()
        if store.find(kind, target.namespace, meta.get("name", "")):
            return store.create(kind, sent)
        return scratch.create(kind, sent)
    return store.create(kind, sent)


def _list(store: Store, target: Target, query: Object) -> Object:
    labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
    with store.changed:
        items = [
            one for one in store.list(target.kind, target.namespace) if matches(one, labels, fields)
        ]
        return {
            "kind": f"{target.kind.name}List",
            "apiVersion": target.kind.group_version,
            "metadata": {"resourceVersion": str(store.version)},
            "items": items,
        }


def _options(query: Object, body: bytes) -> Object:
    return {**(json.loads(body) if body else {}), **query}


def _parsed(body: bytes, media: str) -> Object:
    try:
        if "yaml" in media:
            return dict(yaml.safe_load(body))
        return dict(json.loads(body))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ApiError(400, "BadRequest", f"error decoding the body: {error}") from error


def _normal(kind: Kind, sent: Object) -> Object:
    """Without nulls, and with a Secret's text encoded."""
    normal: Object = without_nulls(copy.deepcopy(sent))
    if kind == SECRET:
        for key, text in normal.pop("stringData", {}).items():
            encoded = base64.b64encode(text.encode()).decode()
            normal.setdefault("data", {})[key] = encoded
        normal.setdefault("type", "Opaque")
    return normal


def merge(base: Any, patch: Any, *, lists: bool = False) -> Any:
    """A JSON merge patch; with ``lists``, items of lists are merged by their name."""
    if lists and isinstance(base, list) and isinstance(patch, list):
        if not all(isinstance(one, dict) and "name" in one for one in [*base, *patch]):
            return patch
        named = {one["name"]: one for one in base}
        for one in patch:
            named[one["name"]] = merge(named.get(one["name"], {}), one, lists=True)
        return list(named.values())
    if not isinstance(patch, dict) or not isinstance(base, dict):
        return patch
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key, {}), value, lists=lists)
    return merged


def _review(access: Access, sent: Object) -> Object:
    asked = sent["spec"]["resourceAttributes"]
    resource = asked["resource"]
    if asked.get("subresource"):
        resource += f"/{asked['subresource']}"
    return {**sent, "status": {"allowed": access.allows(asked["verb"], resource)}}
