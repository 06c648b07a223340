"""Environment variables whose values only the node knows."""

from __future__ import annotations

import contextlib
import os

from dtrain.node.agent.folder import expand
from dtrain.node.agent.wire import raw
from dtrain.node.interfaces import interface_to, owners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.wire import Json

_DEFAULTS = {"PATH": os.fsencode(os.defpath)}
"""What a variable means where it is not set."""


class NodeVariables:
    """Completes environments; see `dtrain.launchplan.environment.NodeVariable`."""

    def __init__(self, folder: bytes, workdir: bytes) -> None:
        """``folder`` is the run's folder, ``workdir`` the working folder of its processes."""
        self._folder, self._workdir = folder, workdir
        self._interfaces: dict[str, bytes | None] = {}

    def complete(self, environment: dict[bytes, bytes], variables: dict[str, Json]) -> None:
        """Add ``variables`` to ``environment``, in their order."""
        for name, variable in variables.items():
            place, key = variable["place"], raw(name)
            names = (key, *map(raw, variable["instead"])) if place == "default" else ()
            value = next((environment[one] for one in names if one in environment), None)
            if value is None:
                value = self._value(variable)
            if value is not None:
                if place == "front":
                    value = _in_front(value, environment.get(key, _DEFAULTS.get(name, b"")))
                environment[key] = value

    def _value(self, variable: Json) -> bytes | None:
        """None if this node has no such value."""
        kind, value = variable["kind"], variable["value"]
        if kind == "interface":
            if value not in self._interfaces:
                self._interfaces[value] = _interface_to(value)
            return self._interfaces[value]
        if kind == "file" or (kind == "pipe" and self._makes_pipes()):
            return os.path.join(self._folder, raw(value)) if value else self._folder
        if kind == "folder":
            return expand(value, self._workdir)
        return raw(value) if kind == "text" else None

    def _makes_pipes(self) -> bool:
        """torch aborts a process that cannot create its pipe."""
        trial = os.path.join(self._folder, b"trial.pipe")
        with contextlib.suppress(OSError):
            os.mkfifo(trial)
            os.unlink(trial)
            return True
        return False


def _interface_to(target: str) -> bytes | None:
    """None without a route to ``target``, and if the kernel does not list our addresses."""
    name = None
    with contextlib.suppress(OSError):
        name = interface_to(target, owners())
    return None if name is None else os.fsencode(name)


def _in_front(folder: bytes, path: bytes) -> bytes:
    """``path`` with ``folder`` first. The setup lines may have put it there."""
    return path if path.split(b":")[0] == folder else b":".join(filter(None, (folder, path)))
