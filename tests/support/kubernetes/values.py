"""What a pod's specification refers to: variables and files, from the objects of the cluster."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from support.kubernetes.errors import ApiError
from support.kubernetes.kinds import CLAIM, CONFIG_MAP, SECRET, Kind, Object
from support.kubernetes.store import Store

SOURCES = {"secret": SECRET, "configMap": CONFIG_MAP}


class NotReady(Exception):
    """The container cannot be created now."""


def data(store: Store, kind: Kind, namespace: str, name: str) -> dict[str, bytes]:
    """Raises NotReady."""
    try:
        found = store.get(kind, namespace, name)
    except ApiError as error:
        raise NotReady(str(error)) from error
    texts, binary = found.get("data", {}), found.get("binaryData", {})
    if kind == SECRET:
        texts, binary = {}, texts
    decoded = {key: base64.b64decode(value) for key, value in binary.items()}
    return {key: value.encode() for key, value in texts.items()} | decoded


def environment(store: Store, pod: Object, container: Object) -> dict[str, str]:
    """Raises NotReady."""
    namespace = pod["metadata"]["namespace"]
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        for key, kind in (("secretRef", SECRET), ("configMapRef", CONFIG_MAP)):
            if key in source:
                for name, value in data(store, kind, namespace, source[key]["name"]).items():
                    found[source.get("prefix", "") + name] = value.decode()
    for variable in container.get("env", ()):
        origin = variable.get("valueFrom")
        if origin is None:
            found[variable["name"]] = expand(variable.get("value", ""), found)
        elif (value := _referred(store, pod, container, origin)) is not None:
            found[variable["name"]] = value
    return found


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace ``$(NAME)``; ``$$`` is an escape."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", value, text)


def _referred(store: Store, pod: Object, container: Object, origin: Object) -> str | None:
    if "fieldRef" in origin:
        return field(pod, origin["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in origin:
        here: object = container.get("resources", {})
        for name in origin["resourceFieldRef"]["resource"].split(".", 1):
            here = here.get(name, "0") if isinstance(here, dict) else "0"
        return str(here)
    for key, kind in (("secretKeyRef", SECRET), ("configMapKeyRef", CONFIG_MAP)):
        if key in origin:
            wanted = origin[key]
            try:
                values = data(store, kind, pod["metadata"]["namespace"], wanted["name"])
                return values[wanted["key"]].decode()
            except (NotReady, KeyError) as error:
                if wanted.get("optional"):
                    return None
                if isinstance(error, NotReady):
                    raise
                what = f"couldn't find key {wanted['key']} in {kind.name} {wanted['name']}"
                raise NotReady(what) from None
    raise NotReady(f"the source of a variable: {origin}")


def field(pod: Object, path: str) -> str:
    """The value of a downward API path."""
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
        return str(pod["metadata"].get(found[1], {}).get(found[2], ""))
    here: object = pod
    for name in path.split("."):
        here = here.get(name, "") if isinstance(here, dict) else ""
    return str(here)


class Volumes:
    """The folders of a pod's volumes on this machine."""

    def __init__(self, store: Store, pod: Object, folder: Path, claims: Path) -> None:
        """Raises NotReady."""
        self._folder = folder
        self._claims = claims
        self._paths: dict[str, Path] = {}
        self.memory: set[str] = set()
        """Volumes that are held in memory."""
        for volume in pod["spec"].get("volumes", ()):
            self._paths[volume["name"]] = self._make(store, pod, volume)

    def mounts(self, container: Object) -> list[tuple[str, Path | None, bool]]:
        """Where, what (None: a fresh memory), and whether read only."""
        found: list[tuple[str, Path | None, bool]] = []
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in self._paths:
                raise NotReady(f"no volume {mount['name']}")
            source = self._paths[mount["name"]] / mount.get("subPath", "")
            if mount["name"] not in self.memory and not source.exists():
                source.mkdir(parents=True)
            memory = mount["name"] in self.memory
            found.append(
                (mount["mountPath"], None if memory else source, mount.get("readOnly", False))
            )
        return found

    def _make(self, store: Store, pod: Object, volume: Object) -> Path:
        namespace = pod["metadata"]["namespace"]
        path = self._folder / "volumes" / str(volume["name"])
        if "hostPath" in volume:
            host = Path(volume["hostPath"]["path"])
            if volume["hostPath"].get("type") == "DirectoryOrCreate":
                host.mkdir(parents=True, exist_ok=True)
            if not host.exists():
                raise NotReady(f"hostPath type check failed: {host} is not a directory")
            return host
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            if not store.find(CLAIM, namespace, name):
                raise NotReady(f'persistentvolumeclaim "{name}" not found')
            path = self._claims / namespace / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            self.memory.add(volume["name"])
        sources = volume.get("projected", {}).get("sources", [volume])
        for source in sources:
            for key, kind in SOURCES.items():
                if key in source:
                    name = source[key].get("name") or source[key]["secretName"]
                    _write(path, data(store, kind, namespace, name), source[key])
            for item in source.get("downwardAPI", {}).get("items", ()):
                (path / item["path"]).write_text(field(pod, item["fieldRef"]["fieldPath"]))
        return path


def _write(folder: Path, values: dict[str, bytes], source: Object) -> None:
    items = source.get("items") or [{"key": key, "path": key} for key in values]
    for item in items:
        if item["key"] not in values:
            raise NotReady(f"references non-existent key: {item['key']}")
        path = folder / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(values[item["key"]])
        path.chmod(item.get("mode", source.get("defaultMode", 0o644)))
