"""Sends a notification to a webhook."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from dtrain.session.reporting.notify_program import LIMIT, MARGIN, NotifyError
from dtrain.spec.secrets import url_fault


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to another scheme or host, and would turn the POST into a GET."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def post(url: str, body: bytes, limit: float = LIMIT - MARGIN) -> None:
    """POST ``body`` as JSON. Raises NotifyError if the server does not accept it."""
    if wrong := url_fault(url):
        raise NotifyError(wrong)
    headers = {"Content-Type": "application/json", "User-Agent": "dtrain"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - url_fault checked it
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=limit):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise NotifyError(f"the server answered with status {error.code}") from None
    except urllib.error.URLError as error:
        reason = error.reason
        why = reason.strerror if isinstance(reason, OSError) else None
        raise NotifyError(f"cannot reach the server: {why or type(reason).__name__}") from None
    except TimeoutError:
        raise NotifyError(f"no answer within {limit:g} s") from None
