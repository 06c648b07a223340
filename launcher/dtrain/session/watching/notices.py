"""Shows notices of hosts to the user."""

from __future__ import annotations

from dtrain.session.reporting.recorder import Recorder

MAX_NOTICE, MAX_NOTICES = 500, 20
"""Maximum characters of a notice, and maximum notices shown for each host."""


class HostNotices:
    """The notices of one host. Each is shown once, because each relay repeats it, and only some,
    because workers can cause notices."""

    def __init__(self, host: str, recorder: Recorder) -> None:
        self._host = host
        self._recorder = recorder
        self._shown: set[str] = set()

    def show(self, notice: str) -> None:
        text = notice[:MAX_NOTICE]
        if text in self._shown or len(self._shown) > MAX_NOTICES:
            return
        self._shown.add(text)
        if len(self._shown) > MAX_NOTICES:
            text = "more notices from this host are hidden"
        # An earlier attempt may have shown it.
        self._recorder.notice_once(f"{self._host}: {text}")
