"""HTTP to an API server, with the configuration and the connections of the official client.

`Client` is the only place where the package ``kubernetes`` is imported. It returns JSON objects,
which `dtrain.engines.kubernetes.objects` types and limits.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.parse
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dtrain.diagnostics import AnswerError, AuthError, ConnectError, PrepareError, UsageError
from dtrain.messages.decode import ProtocolError, excerpt, parse_object
from dtrain.spec.model import Kubernetes

MAX_ANSWER = 64 << 20
"""Bytes of one answer: the list of thousands of pods."""
MAX_LINE = 1 << 20
"""Bytes of one event of a watch, or of one line of a log; what comes after them is cut off."""
CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
STREAM_SECONDS = 330.0
"""Seconds without a byte after which a stream counts as broken. A quiet worker breaks its stream,
too; the next one continues at the same line."""
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_CHUNK = 1 << 16


class NotFoundError(PrepareError):
    """The server does not know the object."""


class ConflictError(PrepareError):
    """The object exists already."""


class GoneError(PrepareError):
    """The server no longer has the events since the version."""


class Client:
    """Requests to one namespace. Any thread may use it."""

    def __init__(self, keys: Kubernetes) -> None:
        """Reads the kubeconfig. Raises UsageError if there is none, or without the package."""
        self._keys = keys
        # Kept: the user may switch to another context while the job runs.
        self._context = keys.context
        self.namespace = keys.namespace or ""
        self._lock = threading.Lock()
        self._load()

    def _load(self) -> None:
        try:
            from kubernetes.client import rest

            from kubernetes import client, config
        except ImportError:
            raise UsageError(
                "a launch on Kubernetes needs the Python package kubernetes",
                hint="pip install 'dtrain[kubernetes]'",
            ) from None
        configuration = client.Configuration()
        inside = (
            self._context is None
            and "KUBERNETES_SERVICE_HOST" in os.environ
            and "KUBECONFIG" not in os.environ
            and not Path("~/.kube/config").expanduser().exists()
        )
        namespace = None
        try:
            if inside:
                config.load_incluster_config(client_configuration=configuration)
                namespace = Path(_NAMESPACE_FILE).read_text().strip()
            else:
                # The package reads the variable only when it is imported.
                file = os.environ.get("KUBECONFIG")
                config.load_kube_config(
                    file, context=self._context, client_configuration=configuration
                )
                contexts, active = config.list_kube_config_contexts(file)
                named = {one["name"]: one for one in contexts}
                chosen = named.get(self._context, active)
                self._context = chosen["name"]
                namespace = chosen["context"].get("namespace")
        except (
            config.ConfigException, OSError, yaml.YAMLError,
            # A value of another type than the package expects.
            TypeError, ValueError, KeyError, AttributeError,
        ) as error:  # fmt: skip
            raise UsageError(
                f"the kubeconfig cannot be used: {excerpt(str(error))}",
                hint="`kubectl config get-contexts` lists the contexts; set"
                " cluster.kubernetes.context or KUBECONFIG",
            ) from None
        self.namespace = self.namespace or namespace or "default"
        self.server = str(configuration.host).rstrip("/")
        self.host = urllib.parse.urlsplit(self.server).hostname or self.server
        self._configuration = configuration
        self._pool = rest.RESTClientObject(configuration).pool_manager

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
        attempted = self._attempted(method, path)
        answer = self._send(method, path, body, query, READ_SECONDS)
        try:
            data = self._read(answer, attempted)
        finally:
            answer.release_conn()
        try:
            return parse_object(data)
        except ProtocolError as error:
            raise AnswerError(self.host, attempted, error) from None

    def stream(self, path: str, **query: str | int) -> Generator[list[bytes]]:
        """The lines of an answer without an end, as they arrive, each with its newline. The last
        one has none if it is incomplete. Raises as `request`, and ConnectError if the connection
        breaks."""
        import urllib3

        attempted = self._attempted("GET", path)
        answer = self._send("GET", path, None, query, STREAM_SECONDS)
        rest = b""
        try:
            for chunk in answer.stream(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                yield [line + b"\n" for line in lines]
                rest = rest[:MAX_LINE]
            if rest:
                yield [rest]
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectError(self.host, attempted, _words(error)) from None
        finally:
            answer.close()

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str | int],
        seconds: float,
    ) -> Any:
        answer = self._once(method, path, body, query, seconds)
        if answer.status == 401:
            # A short-lived token may have expired.
            answer.close()
            try:
                with self._lock:
                    self._load()
            except UsageError as error:
                # Others may be writing the kubeconfig now.
                raise AuthError(
                    self.host, self._attempted(method, path), error.message, hint=error.hint or ""
                ) from None
            answer = self._once(method, path, body, query, seconds)
        if answer.status < 300:
            return answer
        try:
            said = self._said(self._read(answer, self._attempted(method, path)))
        finally:
            answer.close()
        raise self._refusal(answer.status, method, path, said)

    def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str | int],
        seconds: float,
    ) -> Any:
        import urllib3

        path = path.format(namespace=self.namespace)
        url = f"{self.server}{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query)
        headers = {"Accept": "application/json", "User-Agent": "dtrain"}
        if "watch" in query or path.endswith("/log"):
            headers["Accept"] = "*/*"
        for setting in self._configuration.auth_settings().values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        try:
            return self._pool.request(
                method,
                url,
                body=data,
                headers=headers,
                preload_content=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds),
                retries=False,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectError(
                self.host,
                "asking the API server",
                _words(error),
                hint="check that `kubectl version` works",
            ) from None

    def _attempted(self, method: str, path: str) -> str:
        return f"{method} {path.format(namespace=self.namespace)}"

    def _read(self, answer: Any, attempted: str) -> bytes:
        import urllib3

        try:
            data: bytes = answer.read(MAX_ANSWER + 1)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectError(self.host, attempted, _words(error)) from None
        if len(data) > MAX_ANSWER:
            raise AnswerError(self.host, attempted, f"more than {MAX_ANSWER} bytes")
        return data

    def _said(self, data: bytes) -> str:
        """The message of a Status, or the start of another text."""
        try:
            message = parse_object(data).get("message")
        except ProtocolError:
            message = data[:500].decode(errors="replace")
        text = " ".join(str(message or "").split())
        return text[:500]

    def _refusal(self, status: int, method: str, path: str, said: str) -> Exception:
        attempted = self._attempted(method, path)
        reason = said or f"HTTP status {status}"
        if status == 401:
            return AuthError(
                self.host, attempted, reason, hint="log in again: `kubectl get pods` must work"
            )
        if status == 403:
            return PrepareError(
                self.host,
                attempted,
                reason,
                hint="`dtrain check FILE` lists the permissions that are missing",
            )
        if status == 404:
            return NotFoundError(self.host, attempted, reason)
        if status == 409:
            return ConflictError(self.host, attempted, reason)
        if status == 410:
            return GoneError(self.host, attempted, reason)
        if status == 429 or status >= 500:
            return ConnectError(self.host, attempted, reason)
        return PrepareError(self.host, attempted, reason)


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return excerpt(" ".join(str(reason).split()).rpartition(": ")[2])
