"""The objects of the cluster, each change of them, and who waits for changes."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable
from typing import NamedTuple

from support.kubernetes import clock
from support.kubernetes.errors import ApiError, gone, not_found
from support.kubernetes.kinds import EVENT, POD, Kind, Object

Key = tuple[str, str, str]


class Change(NamedTuple):
    version: int
    key: Key
    before: Object | None
    after: Object | None


class Store:
    """Every method takes and returns copies. ``changed`` is notified after each change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 100
        self.sidecars: list[Object] = []
        """Containers that a webhook adds to each pod."""
        self._objects: dict[Key, Object] = {}
        self._changes: list[Change] = []
        self._oldest = self.version

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        with self.changed:
            return copy.deepcopy(self._find(kind, namespace, name))

    def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        with self.changed:
            return copy.deepcopy(self._objects.get(_key(kind, namespace, name)))

    def list(self, kind: Kind, namespace: str = "") -> list[Object]:
        with self.changed:
            return [
                copy.deepcopy(found)
                for key, found in sorted(self._objects.items())
                if key[0] == kind.plural and namespace in ("", key[1])
            ]

    def owned(self, kind: Kind, owner: Object) -> list[Object]:
        """The objects of a kind that ``owner`` controls."""
        uid, namespace = owner["metadata"]["uid"], owner["metadata"].get("namespace", "")
        return [
            found
            for found in self.list(kind, namespace)
            if any(ref["uid"] == uid for ref in found["metadata"].get("ownerReferences", ()))
        ]

    def create(self, kind: Kind, wanted: Object) -> Object:
        made = copy.deepcopy(wanted)
        made["apiVersion"], made["kind"] = kind.group_version, kind.name
        meta = made["metadata"]
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        meta.setdefault("uid", str(uuid.uuid4()))
        meta["creationTimestamp"] = clock.now()
        meta.setdefault("generation", 1)
        key = _key(kind, meta.get("namespace", ""), meta["name"])
        with self.changed:
            if key in self._objects:
                what = f'{kind.resource} "{meta["name"]}" already exists'
                raise ApiError(409, "AlreadyExists", what)
            return self._write(key, made)

    def edit(
        self, kind: Kind, namespace: str, name: str, change: Callable[[Object], None]
    ) -> Object:
        """Apply ``change`` to an object. Nothing happens where it changes nothing."""
        with self.changed:
            before = self._find(kind, namespace, name)
            after = copy.deepcopy(before)
            change(after)
            if after == before:
                return after
            if after.get("spec") != before.get("spec"):
                after["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
            meta = after["metadata"]
            ends = kind != POD or meta.get("deletionGracePeriodSeconds") == 0
            if "deletionTimestamp" in meta and ends and not meta.get("finalizers"):
                return self.remove(kind, namespace, name)
            return self._write(_key(kind, namespace, name), after)

    def remove(self, kind: Kind, namespace: str, name: str) -> Object:
        """Remove an object now."""
        with self.changed:
            found = copy.deepcopy(self._find(kind, namespace, name))
            key = _key(kind, namespace, name)
            del self._objects[key]
            self._note(key, found, None)
            return copy.deepcopy(found)

    def since(self, version: int) -> list[Change]:
        """The changes after a version. Raises ApiError 410 if they are forgotten."""
        with self.changed:
            if version < self._oldest:
                raise gone(version)
            return [change for change in self._changes if change.version > version]

    def forget_changes(self) -> None:
        """Watches that begin at a version before this moment get 410."""
        with self.changed:
            self.version += 1
            self._oldest = self.version
            self._changes.clear()

    def event(self, about: Object, reason: str, message: str, type_: str = "Warning") -> None:
        """Record an Event about an object, once."""
        meta = about["metadata"]
        namespace = meta.get("namespace", "default")
        known = (meta["uid"], reason, message)
        with self.changed:
            for found in self.list(EVENT, namespace):
                if (found["involvedObject"]["uid"], found["reason"], found["message"]) == known:
                    return
            involved = {
                "kind": about["kind"],
                "apiVersion": about["apiVersion"],
                "namespace": namespace,
                "name": meta["name"],
                "uid": meta["uid"],
            }
            event = {
                "metadata": {"generateName": f"{meta['name']}.", "namespace": namespace},
                "involvedObject": involved,
                "reason": reason,
                "message": message,
                "type": type_,
                "count": 1,
                "firstTimestamp": clock.now(),
                "lastTimestamp": clock.now(),
                "source": {"component": "test"},
                "reportingComponent": "test",
                "reportingInstance": "",
            }
            self.create(EVENT, event)

    def _find(self, kind: Kind, namespace: str, name: str) -> Object:
        try:
            return self._objects[_key(kind, namespace, name)]
        except KeyError:
            raise not_found(kind, name) from None

    def _write(self, key: Key, after: Object) -> Object:
        before = self._objects.get(key)
        self._objects[key] = after
        self._note(key, before, after)
        return copy.deepcopy(after)

    def _note(self, key: Key, before: Object | None, after: Object | None) -> None:
        """Objects in the store and in changes are never changed again."""
        self.version += 1
        seen = after or before
        assert seen
        seen["metadata"]["resourceVersion"] = str(self.version)
        self._changes.append(Change(self.version, key, before, after))
        self.changed.notify_all()


def _key(kind: Kind, namespace: str, name: str) -> Key:
    return (kind.plural, namespace if kind.namespaced else "", name)


def condition(found: Object, type_: str) -> Object | None:
    """A condition of an object that is true."""
    for one in found.get("status", {}).get("conditions", ()):
        if one["type"] == type_ and one["status"] == "True":
            return dict(one)
    return None


def set_condition(
    found: Object, type_: str, reason: str, message: str, *, status: str = "True"
) -> None:
    conditions = found.setdefault("status", {}).setdefault("conditions", [])
    known = {"type": type_, "status": status, "reason": reason, "message": message}
    for one in conditions:
        if one["type"] == type_:
            if any(one.get(key) != value for key, value in known.items()):
                one |= known | {"lastTransitionTime": clock.now()}
            return
    conditions.append(known | {"lastTransitionTime": clock.now()})


def owner_reference(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
