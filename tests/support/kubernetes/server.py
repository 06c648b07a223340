"""The API server: HTTPS, one thread for each connection."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.kubernetes import clock, discovery, requests, web_socket
from support.kubernetes.access import Access
from support.kubernetes.errors import ApiError
from support.kubernetes.kinds import KINDS, POD, Kind, Object
from support.kubernetes.logs import Log, previous
from support.kubernetes.requests import Target
from support.kubernetes.selectors import matches
from support.kubernetes.store import Change, Store

WATCH = 60.0
"""Seconds until a watch without a limit ends."""


Starter = Callable[[Object, str, list[str]], "subprocess.Popen[bytes]"]


class Server:
    """Runs from `start` to `stop`, at the same address every time."""

    def __init__(self, store: Store, access: Access) -> None:
        self.store = store
        self.access = access
        self.logs: dict[tuple[str, str, str], Log | ApiError] = {}
        """By namespace, pod and container."""
        self.requests: list[str] = []
        """Each request's verb and path, without its query."""
        self.start_program: Starter | None = None
        """Starts a program in a container."""
        self.removed: set[str] = set()
        """Groups that are not installed."""
        self.watches = 0
        """Watches that began before this count was raised end."""
        self._tls = access.server_context()
        self._port = 0
        self._http: _Http | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind in KINDS if kind.group not in self.removed]

    def start(self) -> None:
        self._http = _Http(self, self._tls, self._port)
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections, and end those that are open."""
        if self._http and self._thread:
            http, self._http = self._http, None
            http.shutdown()
            self._thread.join()
            http.end_connections()
            self.end_watches()
            http.server_close()

    def end_watches(self) -> None:
        with self.store.changed:
            self.watches += 1
            self.store.changed.notify_all()
        for log in list(self.logs.values()):
            if isinstance(log, Log):
                log.cut()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, server: Server, tls: ssl.SSLContext, port: int) -> None:
        self.api = server
        self._tls = tls
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def get_request(self) -> tuple[socket.socket, object]:
        plain, address = self.socket.accept()
        # The handler's thread does the handshake.
        secure = self._tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self._open.add(secure)
        return secure, address

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _serve(self) -> None:
        api = self.server.api
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        split = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(split.query))
        api.requests.append(f"{self.command} {split.path}")
        try:
            if split.path in ("/healthz", "/readyz", "/livez"):
                return self._send(200, b"ok", "text/plain")
            api.access.authenticate(self.headers.get("Authorization", ""))
            found = discovery.answer(split.path, api.kinds)
            if found is None:
                target = requests.parse(split.path, api.kinds)
                found = self._answer(target, query, body)
            if found is not None:
                code, document = found if isinstance(found, tuple) else (200, found)
                self._send(code, json.dumps(document).encode())
        except ApiError as error:
            self._send(error.code, json.dumps(error.status).encode())
        return None

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self, target: Target, query: Object, body: bytes) -> object:
        api = self.server.api
        verb = requests.verb(self.command, target, query)
        if target.sub != "status":
            api.access.authorize(verb, target.kind, target.sub, target.namespace)
        if target.sub == "log" and target.kind == POD:
            self._stream(self._log(target, query), "text/plain")
            return None
        if target.sub == "exec" and target.kind == POD:
            self._exec(target, urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query))
            return None
        if verb == "watch":
            changes = self._watch(target, query)
            next(changes)  # a bad query is refused before the stream begins
            self._stream(changes, "application/json")
            return None
        media = self.headers.get("Content-Type", "")
        return requests.answer(api.store, api.access, verb, target, query, body, media)

    def _exec(self, target: Target, query: dict[str, list[str]]) -> None:
        api = self.server.api
        if self.headers.get("Upgrade", "").lower() != "websocket":
            raise ApiError(400, "BadRequest", "you must use a WebSocket")
        pod = api.store.get(POD, target.namespace, target.name)
        assert api.start_program
        process = api.start_program(pod, query["container"][0], query["command"])
        self.close_connection = True
        self.send_response(101)
        for name, value in web_socket.accept(self.headers):
            self.send_header(name, value)
        self.end_headers()
        web_socket.carry(self.connection, process)

    def _log(self, target: Target, query: Object) -> Iterator[bytes]:
        api = self.server.api
        pod = api.store.get(POD, target.namespace, target.name)
        names = [
            one["name"]
            for key in ("containers", "initContainers")
            for one in pod["spec"].get(key, ())
        ]
        container = query.get("container") or names[0]
        if container not in names:
            message = f"container {container} is not valid for pod {target.name}"
            raise ApiError(400, "BadRequest", message)
        place = (target.namespace, target.name)
        if query.get("previous") == "true":
            log = api.logs.get((*place, previous(container)))
            message = (
                f'previous terminated container "{container}" in pod "{target.name}" not found'
            )
        else:
            log = api.logs.get((*place, container))
            message = (
                f'container "{container}" in pod "{target.name}" is waiting to start:'
                " ContainerCreating"
            )
        if log is None:
            raise ApiError(400, "BadRequest", message)
        if isinstance(log, ApiError):
            raise log
        since = clock.parse(query["sinceTime"]) if "sinceTime" in query else 0
        if "sinceSeconds" in query:
            since = time.time_ns() - int(query["sinceSeconds"]) * 10**9
        began = api.watches
        return log.read(
            follow=query.get("follow") == "true",
            since=since,
            tail=int(query["tailLines"]) if "tailLines" in query else None,
            limit=int(query["limitBytes"]) if "limitBytes" in query else None,
            timestamps=query.get("timestamps") == "true",
            stopped=lambda: api.watches > began,
        )

    def _watch(self, target: Target, query: Object) -> Iterator[bytes]:
        api = self.server.api
        store = api.store
        labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
        if target.name:
            fields = f"metadata.name={target.name}"
        began = api.watches
        end = time.monotonic() + float(query.get("timeoutSeconds") or WATCH)
        seen = int(query.get("resourceVersion") or 0)
        initial = query.get("sendInitialEvents") == "true"
        yield b""  # an API server answers before the first event
        if initial or not seen:
            with store.changed:
                seen, found = store.version, store.list(target.kind, target.namespace)
            for one in found:
                if matches(one, labels, fields):
                    yield _line("ADDED", one)
        if initial:
            yield _bookmark(target.kind, seen, {"k8s.io/initial-events-end": "true"})
        while True:
            with store.changed:
                while not (changes := _since(store, seen)):
                    left = end - time.monotonic()
                    if left <= 0 or api.watches > began:
                        break
                    store.changed.wait(left)
                seen = max(seen, store.version)
            if isinstance(changes, ApiError):
                yield _line("ERROR", changes.status)
                return
            lines = [_seen(change, target, labels, fields) for change in changes]
            yield b"".join(lines)
            if time.monotonic() >= end or api.watches > began:
                if query.get("allowWatchBookmarks") == "true" and api.watches == began:
                    yield _bookmark(target.kind, seen, {})
                return

    def _send(self, code: int, body: bytes, media: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, chunks: Iterable[bytes], media: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", media)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            if chunk:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")


def _since(store: Store, version: int) -> list[Change] | ApiError:
    try:
        return store.since(version)
    except ApiError as error:
        return error


def _seen(change: Change, target: Target, labels: str, fields: str) -> bytes:
    """The event of a watch; a change of the labels can make an object appear or disappear."""
    plural, namespace, _ = change.key
    if plural != target.kind.plural or target.namespace not in ("", namespace):
        return b""
    before = change.before is not None and matches(change.before, labels, fields)
    after = change.after is not None and matches(change.after, labels, fields)
    if after:
        assert change.after
        return _line("MODIFIED" if before else "ADDED", change.after)
    if before:
        gone = dict(change.after or change.before or {})
        return _line("DELETED", gone)
    return b""


def _bookmark(kind: Kind, version: int, annotations: Object) -> bytes:
    meta = {"resourceVersion": str(version), "annotations": annotations}
    return _line(
        "BOOKMARK", {"kind": kind.name, "apiVersion": kind.group_version, "metadata": meta}
    )


def _line(type_: str, found: Object) -> bytes:
    return json.dumps({"type": type_, "object": found}).encode() + b"\n"
