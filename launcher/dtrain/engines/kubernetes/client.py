"""HTTP to an API server.

`Client` returns JSON objects, which `dtrain.engines.kubernetes.objects` types and limits.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dtrain.diagnostics import AnswerError, AuthError, ConnectError, PrepareError, UsageError
from dtrain.engines.kubernetes import credentials
from dtrain.engines.kubernetes.credentials import Credentials
from dtrain.engines.kubernetes.kinds import PODS
from dtrain.engines.kubernetes.line_stream import LineStream, QuietError
from dtrain.messages.decode import ProtocolError, answer_of, excerpt, parse_object
from dtrain.spec.model import Kubernetes

MAX_ANSWER = 64 << 20
"""Bytes of one answer: the list of thousands of pods."""
CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
BUSY_TRIES, BUSY_SECONDS = 5, 5.0
"""Times that a request is sent to a busy server, which names the time to wait; the longest wait."""
EXEC_PROTOCOLS = "v5.channel.k8s.io,v4.channel.k8s.io"


class NotFoundError(PrepareError):
    """The server does not know the object, or its kind."""


class AbsentError(NotFoundError):
    """The server knows the kind, and has no such object."""


class ForbiddenError(PrepareError):
    """The user lacks a permission."""


class ConflictError(PrepareError):
    """The object exists already."""


class GoneError(PrepareError):
    """The server no longer has the events since the version."""


class Client:
    """Requests to one namespace. Any thread may use it."""

    def __init__(self, keys: Kubernetes) -> None:
        """Reads the kubeconfig. Raises UsageError if there is none, or without the package."""
        self._credentials = credentials.log_in(keys.context)
        self.namespace = keys.namespace or self._credentials.namespace or "default"
        self._lock = threading.Lock()

    @property
    def context(self) -> str | None:
        """The context of the kubeconfig; None for a service account."""
        return self._credentials.context

    @property
    def host(self) -> str:
        """The API server in messages."""
        return self._credentials.host

    def _log_in_again(self, known: Credentials) -> None:
        """Replace the login ``known``, unless another thread has done it. Raises AuthError."""
        try:
            with self._lock:
                if self._credentials is known:
                    # In the same context: the user may switch to another one while the job runs.
                    self._credentials = credentials.log_in(known.context)
        except UsageError as error:
            # Others may be writing the kubeconfig now.
            raise AuthError(self.host, "logging in", error.message, hint=error.hint) from None

    # Requests ------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        **query: str | int,
    ) -> dict[str, Any]:
        """The JSON object that the server answers. ``{namespace}`` in ``path`` is the namespace.

        Raises ConnectError if the server cannot be reached or is not ready, AuthError,
        NotFoundError, ConflictError, AnswerError, and PrepareError for other refusals.
        """
        path = path.format(namespace=self.namespace)
        attempted = f"{method} {path}"
        once = partial(self._once, method, path, body, query)
        data = self._read(self._send(once, attempted), attempted)
        with answer_of(self.host, attempted):
            return parse_object(data)

    def stream(self, path: str, **query: str | int) -> LineStream:
        """An answer without an end, once it begins. Raises as `request`."""
        path = path.format(namespace=self.namespace)
        attempted = f"GET {path}"
        once = partial(self._once, "GET", path, None, query)
        return LineStream(self.host, attempted, self._send(once, attempted))

    def start(self, pod: str, container: str, argv: Sequence[str]) -> Any:
        """Start a program in a pod. The WebSocket that carries its input and output. Raises as
        `request`."""
        streams = [("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        query = [("container", container), *streams, *(("command", word) for word in argv)]
        path = f"{PODS}/{pod}/exec".format(namespace=self.namespace)
        place = f"{path}?{urllib.parse.urlencode(query)}"
        used = self._credentials
        try:
            return self._web_socket(used, place)
        except AuthError:
            # A short-lived token may have expired.
            self._log_in_again(used)
            return self._web_socket(self._credentials, place)

    def _web_socket(self, used: Credentials, place: str) -> Any:
        import websocket

        attempted = "starting a program in its pod"  # the same for all pods
        try:
            return used.web_socket(re.sub("^http", "ws", used.server) + place, EXEC_PROTOCOLS)
        except websocket.WebSocketBadStatusException as refusal:
            # Old versions of the package do not have it.
            body = getattr(refusal, "resp_body", None) or b""
            raise self._refusal(refusal.status_code, attempted, body) from None
        except (websocket.WebSocketException, OSError) as error:
            reason = excerpt(" ".join(str(error).split()))
            hint = "check that `kubectl exec POD -- true` works"
            raise ConnectError(self.host, attempted, reason, hint=hint) from None

    def _send(self, once: Callable[[], Any], attempted: str) -> Any:
        """The answer to a request that ``once`` sends, still to be read."""
        answer = self._authorized(once)
        for _ in range(BUSY_TRIES - 1):
            if (wait := _wait_asked(answer)) is None:
                break
            answer.close()
            time.sleep(wait)
            answer = self._authorized(once)
        if answer.status < 300:
            return answer
        raise self._refusal(answer.status, attempted, self._read(answer, attempted))

    def _authorized(self, once: Callable[[], Any]) -> Any:
        """The answer to a request, with a new login if the server refuses the old one."""
        used = self._credentials
        if used.problem:
            self._log_in_again(used)
            used = self._credentials
        answer = once()
        if answer.status == 401:
            # A short-lived token may have expired.
            answer.close()
            self._log_in_again(used)
            answer = once()
        return answer

    def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str | int],
    ) -> Any:
        import urllib3

        used = self._credentials
        url = f"{used.server}{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query)
        headers = {"Accept": "application/json", "User-Agent": "dtrain", **used.headers()}
        if "watch" in query or path.endswith("/log"):
            headers["Accept"] = "*/*"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        try:
            return used.pool.request(
                method,
                url,
                body=data,
                headers=headers,
                preload_content=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
                retries=False,
                redirect=False,
            )
        except urllib3.exceptions.ReadTimeoutError as error:
            raise QuietError(self.host, f"{method} {path}", _words(error)) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectError(
                self.host,
                "asking the API server",
                _words(error),
                hint="check that `kubectl version` works",
            ) from None

    def _read(self, answer: Any, attempted: str) -> bytes:
        """All of an answer, which is then closed."""
        import urllib3

        try:
            data: bytes = answer.read(MAX_ANSWER + 1)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectError(self.host, attempted, _words(error)) from None
        finally:
            answer.close()
        if len(data) > MAX_ANSWER:
            raise AnswerError(self.host, attempted, f"more than {MAX_ANSWER} bytes")
        return data

    def _refusal(self, status: int, attempted: str, data: bytes) -> Exception:
        """``data``: a Status, or another text."""
        try:
            body = parse_object(data)
        except ProtocolError:
            body = {"message": data[:500].decode(errors="replace")}
        said = " ".join(str(body.get("message") or "").split())
        reason = said[:500] or f"HTTP status {status}"
        if status == 401:
            return AuthError(self.host, attempted, reason, hint=credentials.HINT)
        if status == 403:
            return ForbiddenError(
                self.host,
                attempted,
                reason,
                hint="`dtrain check FILE` lists the permissions that are missing",
            )
        if status == 404:
            details = body.get("details")
            # A server that has just started may not know the kinds of CRDs yet.
            if isinstance(details, dict) and details.get("name"):
                return AbsentError(self.host, attempted, reason, hint=_hint_on_absent(details))
            hint = "`dtrain check FILE` says what the cluster does not have"
            return NotFoundError(self.host, attempted, reason, hint=hint)
        if status == 409:
            return ConflictError(self.host, attempted, reason)
        if status == 410:
            return GoneError(self.host, attempted, reason)
        if status == 429 or status >= 500:
            return ConnectError(self.host, attempted, reason)
        return PrepareError(self.host, attempted, reason)


def _hint_on_absent(details: dict[str, Any]) -> str:
    if details.get("kind") != "namespaces":
        return ""
    return "`kubectl get namespaces` lists the namespaces; set cluster.kubernetes.namespace"


def _wait_asked(answer: Any) -> float | None:
    """Seconds that a busy server asks to wait before the request is sent again."""
    if answer.status not in (429, 503):
        return None
    seconds = str(answer.headers.get("Retry-After", ""))
    return min(BUSY_SECONDS, float(seconds)) if re.fullmatch("[0-9]{1,6}", seconds) else None


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    cause = getattr(reason, "original_error", None)  # of a proxy
    text = excerpt(" ".join(str(cause or reason).split()).rpartition(": ")[2])
    return f"the proxy: {text}" if cause else text
