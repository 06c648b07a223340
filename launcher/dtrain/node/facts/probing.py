"""Runs probes so that none raises, and words their failures."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from dtrain.node.facts.files import Json

LIMIT = 20.0
"""The default time limit of a probe in seconds."""
MAX_ERROR = 2000
"""Characters of an error message."""
AT_ONCE = 32
"""Threads for calls that may take long."""


def at_once(function: Callable[[Any], Any], items: list[Any]) -> dict[Any, Any]:
    """The results of ``function`` by item, computed in parallel."""
    found: dict[Any, Any] = {}
    left = iter(items)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                item = next(left, None)
            if item is None:
                return
            found[item] = function(item)

    threads = [threading.Thread(target=work, daemon=True) for _ in items[:AT_ONCE]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def guarded(probe: Callable[[], Json]) -> Json:
    try:
        return probe()
    except Exception as failure:  # noqa: BLE001 - a probe that fails is a fact
        return {"error": ("%s: %s" % (type(failure).__name__, failure))[:MAX_ERROR]}


def reason_of(error: Exception) -> str:
    """What the system says about a failure, for the end of a sentence."""
    return (getattr(error, "strerror", None) or str(error)).lower()
