"""The state of a run on this host, from the files in its folder."""

from __future__ import annotations

import contextlib
import os
import socket

from dtrain.node.agent.control import (
    MAX_RECORD,
    DamagedError,
    call_supervisor,
    find_supervisor,
    lives,
    machine_id,
    open_events,
    peer_of,
    record_in,
)
from dtrain.node.agent.events import EventReader, damage
from dtrain.node.agent.folder import cannot_write, open_run
from dtrain.node.agent.supervisor_connection import ENDED_WELL, UNSEEN
from dtrain.node.agent.wire import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtrain.node.agent.wire import Json
    from dtrain.node.trust import Trust

RESTARTED = "the machine was restarted, or this is another machine"


class RunState:
    """The run in one folder. Its processes may have changed or removed any file there."""

    def __init__(self, folder: bytes, trust: Trust) -> None:
        self.folder = folder
        self.trust = trust
        self._events_file: bytes | int = os.path.join(folder, b"events")

    def find_supervisor(self) -> tuple[Json | None, socket.socket | None]:
        """The supervisor's record, and a connection to the supervisor if it answers. Both are None
        before the run is prepared. Raises the same errors as `_record`."""
        problem: Exception | None = None
        try:
            record = self._record()
        except (FileNotFoundError, DamagedError) as error:
            record, problem = None, error
        sock = call_supervisor(record) if record is not None else None
        sock = sock or find_supervisor(self.folder)
        if sock is None and problem is not None:
            raise problem
        return record, sock

    def _record(self) -> Json | None:
        """The supervisor's record in the run's folder; None before the run is prepared.

        Raises FileNotFoundError if there is no folder, RefusedError if it is unsafe, and
        DamagedError.
        """
        try:
            folder = open_run(self.trust, self.folder)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError from None
        except OSError as error:
            raise cannot_write(error, self.folder) from None
        try:
            fd = self.trust.open_file(b"supervisor", os.O_RDONLY, folder, self.folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedError(cannot_write(error, self.folder).message["reason"]) from None
        finally:
            os.close(folder)
        with os.fdopen(fd, "rb") as file:
            return record_in(file.read(MAX_RECORD), self.folder)

    def open_events(self, supervisor: int) -> bool:
        """Open the events file and read events from it from now on. ``supervisor`` is the process
        that has it open, or 0. Returns whether it was opened."""
        with contextlib.suppress(OSError):
            self._events_file = open_events(supervisor, self.folder)
        return isinstance(self._events_file, int)

    def events(self) -> EventReader:
        return EventReader(self._events_file)

    def has_ended(self) -> bool:
        return any(event["event"] == "ended" for event in self.events().all())

    def status(self) -> Json:
        """The ``status`` message: the state of the run on this host."""
        try:
            record, sock = self.find_supervisor()
        except FileNotFoundError:
            why = "%s does not exist" % shown(self.folder)
            return status("missing", None, why, [])
        self.open_events(peer_of(sock)[0] if sock is not None else 0)
        events: dict[str, list[Json]] = {"started": [], "exited": [], "ended": []}
        for event in self.events().all():
            events.get(event["event"], []).append(event)
        started = events["started"]
        exited = {(event["role"], event["index"]): event for event in events["exited"]}
        processes = []
        for event in started:
            end = exited.get((event["role"], event["index"]), {})
            names = {name: event[name] for name in ("role", "index", "rank", "pid")}
            fate = {"ended": end.get("time"), "code": end.get("code"), "signal": end.get("signal")}
            processes.append({**names, "started": event["time"], **fate})
        ended = [event["time"] for event in events["ended"]]
        if ended:
            state, since, why = "ended", ended[0], ""
        else:
            state, why = self._standing(record, sock, bool(started))
            since = started[0]["time"] if started and state == "running" else None
        return status(state, since, why, processes)

    def _standing(
        self, record: Json | None, sock: socket.socket | None, started: bool
    ) -> tuple[str, str]:
        """The state of a run without an ``ended`` event, and the reason for it."""
        if sock is not None:
            return "running" if started else "ready", ""
        if record is None:
            return "preparing", ""
        if record["machine"] != machine_id():
            return "gone", RESTARTED
        if lives(record):
            return "running", "its supervisor (process %d) does not answer" % record["pid"]
        return "gone", self.why_lost("its supervisor was killed", UNSEEN)

    def why_lost(self, died: str, end: str) -> str:
        """Why the end of the run is unknown: ``died``, unless a process of the job has changed the
        events file. ``end`` is how the supervisor ended."""
        path = os.path.join(self.folder, b"events")
        wrong = damage(path) if end in (UNSEEN, ENDED_WELL) else ""
        if end == ENDED_WELL and not wrong:
            wrong = "has no record of the end"
        if not wrong:
            return died
        return "the supervisor has ended, but %s %s; a process of the job has changed that file" % (
            shown(path),
            wrong,
        )


def status(state: str, since: float | None, why: str, processes: list[Any]) -> Json:
    found = {"state": state, "since": since, "why": why, "processes": processes}
    return {"type": "status", **found}
