"""Runs workers through the client of a container engine, see `dtrain.launchplan.container`."""

from __future__ import annotations

import contextlib
import os
import re

from dtrain.node.agent.folder import expand
from dtrain.node.agent.spawn import search
from dtrain.node.agent.wire import RefusedError, raw, shown
from dtrain.node.files import executable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.commands import SupervisorRequest
    from dtrain.node.agent.wire import Json

REMOVE_LIMIT = 10.0
"""Seconds for the engine to remove the containers of a run."""


class Containers:
    """The containers of a run on this host.

    The client has no tag of the run, unlike the worker, so that a sweep sends TERM to the worker
    alone: the client would send it a second time, and its helpers must outlive the worker.
    Raises RefusedError if the engine is missing.
    """

    def __init__(
        self,
        body: Json,
        request: SupervisorRequest,
        environment: dict[bytes, bytes],
        tag: dict[bytes, bytes],
    ) -> None:
        """``environment`` is the host's own."""
        self._body = body
        self._environment = {name: value for name, value in environment.items() if name not in tag}
        root = os.geteuid() == 0
        self._values = {
            "workdir": raw(request["absolute_workdir"]),
            "run_dir": raw(request["folder"]),
            "home": expand("~"),
            "user": b"%d:%d" % (os.geteuid(), os.getegid()),
            "user_namespace": b"host" if root else b"keep-id",
        }
        self._program = self._find(raw(body["program"]))

    def argv(self, words: list[list[Json | str]]) -> list[bytes]:
        """The words in front of a worker's command, completed."""
        found = [
            b"".join(raw(part) if isinstance(part, str) else self._value(part) for part in word)
            for word in words
        ]
        return [self._program, *found[1:]]

    def _value(self, slot: Json) -> bytes:
        value = self._values[slot["node"]]
        # It may be a part of a mount, which lists its fields in one word.
        unfit = rb"[:\s]" if self._body["program"] == "enroot" else rb'[,"\r\n]'
        if value.startswith(b"/") and re.search(unfit, value):
            what = "colon or space" if self._body["program"] == "enroot" else "comma or quote"
            raise RefusedError(
                "container",
                "%s cannot mount %s: the name has a %s"
                % (self._body["program"], shown(value), what),
                "use folders without it (`job.workdir`, `cluster.run_dir`)",
            )
        return value

    def environment(self, own: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The environment of the client of a worker with the environment ``own``."""
        prefix = raw(self._body["prefix"])
        left_out = {raw(name) for name in self._body["left_out"]}
        given = {prefix + name: value for name, value in own.items() if name not in left_out}
        return {**self._environment, **given}

    def _find(self, program: bytes) -> bytes:
        for path in filter(executable, search(program, self._environment)):
            return path
        on_path = shown(self._environment.get(b"PATH", b""))
        raise RefusedError(
            "container",
            "%s not found on PATH (%s)" % (shown(program), on_path),
            "install it on this host, or name another engine in `job.container.engine`",
        )


def remove(containers: Json | None) -> None:
    """End and remove the containers that outlived their workers, if the engine keeps any."""
    command = (containers or {}).get("remove")
    if not command:
        return
    import subprocess  # slow to import, and rarely needed

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=REMOVE_LIMIT,
        )
