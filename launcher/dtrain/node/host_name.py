"""Host names for getaddrinfo."""

from __future__ import annotations


def encoded(name: str) -> str | bytes:
    """``name`` as an argument of `socket.getaddrinfo`. For a string, Python first imports its codec
    of international names, which takes a millisecond."""
    return name.encode() if name.isascii() else name
