"""Times as Kubernetes writes them."""

from __future__ import annotations

import time
from datetime import datetime, timezone


def now() -> str:
    """To the second, as in objects."""
    return at(time.time())


def at(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def nanoseconds(moment: int) -> str:
    """As in logs: the zeros at the end are left out."""
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment // 10**9))
    fraction = f"{moment % 10**9:09d}".rstrip("0")
    return f"{text}.{fraction}Z" if fraction else f"{text}Z"


def parse(text: str) -> int:
    """Nanoseconds since the epoch."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    moment = datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    return int(moment.timestamp()) * 10**9 + int(f"{fraction[:9]:0<9}")
