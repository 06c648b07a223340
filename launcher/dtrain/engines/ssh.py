"""The SSH engine: `dtrain.session.controller`, one connection to each host."""

from __future__ import annotations

from collections.abc import Mapping

from dtrain.runs.record import Record
from dtrain.session.controller import Session
from dtrain.session.inquiry import ask
from dtrain.session.status import HostStatus


class SshEngine(Session):
    def status(self, record: Record, known: Mapping[str, HostStatus]) -> Mapping[str, HostStatus]:
        return ask(record, known, self._transport)
