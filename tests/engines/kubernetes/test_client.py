"""What a launch needs on this machine: the Python package, a kubeconfig, and files that fit."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import sys
import tarfile
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import urllib3
import yaml

from dtrain.diagnostics import AuthError, ConnectError, UsageError
from dtrain.engines.kubernetes import credentials, files
from dtrain.engines.kubernetes.client import AbsentError, Client, ForbiddenError, NotFoundError
from dtrain.spec.model import Kubernetes
from dtrain.sync import scan
from support.kubernetes.access import Access
from support.limits import HANG
from support.ports import free_port


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UsageError) as raised:
        Client(Kubernetes(image="i"))
    assert raised.value.hint.endswith(f"for the Python that runs dtrain: {sys.executable}")


def test_without_a_kubeconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(UsageError, match=f"there is no kubeconfig: {file} does not exist"):
        Client(Kubernetes(image="i", context="prod"))


@pytest.mark.parametrize("text", ["", "clusters: 3", "a: [", "apiVersion: v1\nkind: Config"])
def test_a_file_that_is_no_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="the kubeconfig cannot be used") as raised:
        Client(Kubernetes(image="i", context="prod"))
    assert "kubectl config get-contexts" in raised.value.hint


def kubeconfig(current: str) -> str:
    names = ("dev", "prod")
    return yaml.safe_dump(
        {
            "clusters": [{"name": n, "cluster": {"server": f"http://{n}.test"}} for n in names],
            "users": [{"name": "me", "user": {}}],
            "contexts": [
                {"name": n, "context": {"cluster": n, "user": "me", "namespace": f"of-{n}"}}
                for n in names
            ],
            "current-context": current,
        }
    )


def test_a_context_that_the_kubeconfig_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(kubeconfig("dev"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UsageError, match="the kubeconfig has no context pord") as raised:
        Client(Kubernetes(image="i", context="pord"))
    assert raised.value.hint == "cluster.kubernetes.context must be one of: dev, prod"


def test_a_user_that_impersonates_another_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package would act as the user itself, unlike kubectl."""
    text = kubeconfig("dev").replace("user: {}", "user: {as: admin, as-groups: [ops]}")
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match=r"user me impersonates another one \(as, as-groups\)"):
        Client(Kubernetes(image="i"))


def test_a_new_token_is_read_from_the_context_of_the_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user may switch to another context, or write the file, while the job runs."""
    file = tmp_path / "config"
    file.write_text(kubeconfig("prod"))
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    client = Client(Kubernetes(image="i"))
    expired = SimpleNamespace(status=401, close=lambda: None, read=lambda size: b"expired")
    asked = []

    def once(*_: object) -> SimpleNamespace:
        asked.append((client._credentials.server, client.namespace))
        return expired

    monkeypatch.setattr(client, "_once", once)
    file.write_text(kubeconfig("dev"))
    with pytest.raises(AuthError, match="expired"):
        client.request("GET", "/version")
    file.write_text("")
    with pytest.raises(AuthError, match="the kubeconfig cannot be used"):
        client.request("GET", "/version")
    assert set(asked) == {("http://prod.test", "of-prod")}
    assert client.host == "prod.test"


def test_a_program_is_started_with_a_new_login_after_a_token_has_expired(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, tokens = tmp_path / "config", []
    monkeypatch.setenv("KUBECONFIG", str(file))

    def write(token: str) -> None:
        config = yaml.safe_load(kubeconfig("prod"))
        config["users"][0]["user"] = {"token": token}
        for one in config["clusters"]:
            one["cluster"]["server"] = f"http://127.0.0.1:{server.server_address[1]}"
        file.write_text(yaml.safe_dump(config))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers["Authorization"])
            write("new")
            self.send_error(401 if len(tokens) == 1 else 403)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        write("old")
        with pytest.raises(ForbiddenError):
            Client(Kubernetes(image="i")).start("pod", "node", ["true"])
        server.shutdown()
    assert tokens == ["Bearer old", "Bearer new"]


def test_a_program_is_not_started_by_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(credentials, "START_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        text = kubeconfig("prod").replace("http://prod.test", f"http://127.0.0.1:{port}")
        (tmp_path / "config").write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        with pytest.raises(ConnectError, match="timed out"):
            Client(Kubernetes(image="i")).start("pod", "node", ["true"])


def test_the_code_is_an_archive(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("a")
    (tmp_path / "run.sh").write_text("b")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("lib/a.py")
    found = files.config_files(scan(tmp_path, ()), "")
    assert set(found) == {"runtime.zip", "code.tar.gz"}
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(found["code.tar.gz"]))) as archive:
        entries = {one.name: oct(one.mode) for one in archive.getmembers() if one.isfile()}
        assert archive.getmember("link").linkname == "lib/a.py"
    assert entries == {"lib/a.py": "0o644", "run.sh": "0o755"}


def test_code_that_is_too_large_for_a_config_map(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(1 << 20))
    with pytest.raises(UsageError, match="too much for a ConfigMap"):
        files.config_files(scan(tmp_path, ()), "")


def test_code_that_changes_during_a_launch(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    tree = scan(tmp_path, ())
    (tmp_path / "a.py").write_text("b")
    with pytest.raises(UsageError, match=r"a\.py has changed"):
        files.config_files(tree, "")


class Answer:
    """Of a server, as the connection pool gives it."""

    def __init__(self, status: int, body: object = None, **headers: str) -> None:
        self.status = status
        self.headers = {name.replace("_", "-"): text for name, text in headers.items()}
        self._body = json.dumps(body or {}).encode()

    def read(self, size: int) -> bytes:
        return self._body[:size]

    def close(self) -> None: ...


def client_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, user: dict[str, object], *answers: Answer
) -> tuple[Client, list[dict[str, str]]]:
    """A client, and the headers of each request that it sends to a server with these answers."""
    config = yaml.safe_load(kubeconfig("prod"))
    config["users"][0]["user"] = user
    (folder / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(folder / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    left, sent = list(answers), []

    def request(*_: object, headers: dict[str, str], **_more: object) -> Answer:
        sent.append(headers)
        return left.pop(0)

    monkeypatch.setattr(urllib3.PoolManager, "request", request)
    return Client(Kubernetes(image="i")), sent


def plugin(folder: Path, text: str) -> dict[str, object]:
    program = folder / "plugin"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    api = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": api, "command": str(program), "interactiveMode": "Never"}}


def test_a_login_program_that_fails_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next request runs it again."""
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    token = json.dumps(credential | {"status": {"token": "t"}})
    script = f"[ -e {tmp_path}/ok ] && echo '{token}' && exit; echo 'SSO has ended' >&2; exit 1"
    client, sent = client_of(monkeypatch, tmp_path, plugin(tmp_path, script), Answer(200))
    with pytest.raises(AuthError, match=r"process returned 1\. SSO has ended"):
        client.request("GET", "/version")
    assert "SSO" not in "".join(capfd.readouterr())
    (tmp_path / "ok").touch()
    assert client.request("GET", "/version") == {}
    assert [headers["authorization"] for headers in sent] == ["Bearer t"]


def test_an_exception_of_the_authentication_is_an_authentication_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client, _ = client_of(monkeypatch, tmp_path, {"token": "t"})

    def fails(_: object) -> None:
        raise RuntimeError("no such key ring")

    monkeypatch.setattr("kubernetes.client.Configuration.auth_settings", fails)
    with pytest.raises(AuthError, match="RuntimeError: no such key ring"):
        client.request("GET", "/version")


@pytest.mark.parametrize("key", ["token", "tokenFile"])
def test_a_token_that_ends_with_a_newline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str
) -> None:
    """As editors and `echo` write it; kubectl accepts it."""
    file = tmp_path / "token"
    file.write_text("t\n")
    user: dict[str, object] = {key: str(file) if key == "tokenFile" else "t\n"}
    client, sent = client_of(monkeypatch, tmp_path, user, Answer(200))
    client.request("GET", "/version")
    assert [headers["authorization"] for headers in sent] == ["Bearer t"]


@pytest.mark.parametrize("token", ["hunter2\nhunter2", "hunter2\u2028x", "hunter2 \x00"])
def test_a_token_that_no_header_can_hold_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    client, _ = client_of(monkeypatch, tmp_path, {"token": token}, Answer(200))
    with pytest.raises(AuthError, match="cannot be sent") as raised:
        client.request("GET", "/version")
    assert "hunter2" not in str(raised.value)


@pytest.fixture
def over_tls(tmp_path: Path) -> Iterator[str]:
    """The URL of a server with a certificate of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tls = Access(tmp_path).server_context()
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join(HANG)
    server.server_close()


def test_a_server_that_need_not_be_verified_prints_no_warnings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, over_tls: str
) -> None:
    """There would be one for each request, on stderr."""
    config = yaml.safe_load(kubeconfig("prod"))
    for one in config["clusters"]:
        one["cluster"] = {"server": over_tls, "insecure-skip-tls-verify": True}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert Client(Kubernetes(image="i")).request("GET", "/version") == {}
    assert [str(one.message) for one in shown] == []


def test_a_proxy_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(kubeconfig("prod"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConnectError, match=r"the proxy: .* refused$"):
        Client(Kubernetes(image="i")).request("GET", "/version")


def test_a_request_whose_connection_ends_is_sent_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server may have done what it asks. The caller knows whether to ask again."""
    sent = 0

    def drop() -> None:
        nonlocal sent
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # the test is over
                return
            sent += 1
            connection.recv(100)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drop)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "config").write_text(kubeconfig("prod").replace("http://prod.test", url))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        with pytest.raises(ConnectError):
            Client(Kubernetes(image="i")).request("GET", "/version")
        server.shutdown(socket.SHUT_RDWR)
    thread.join(HANG)
    assert sent == 1


@pytest.mark.filterwarnings("ignore:SOCKS")
def test_a_socks_proxy_without_the_package_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "socks", None)
    monkeypatch.delitem(sys.modules, "urllib3.contrib.socks", raising=False)
    (tmp_path / "config").write_text(kubeconfig("prod"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(UsageError, match="PySocks"):
        Client(Kubernetes(image="i"))


def test_a_busy_server_is_asked_again_when_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    busy = Answer(429, {"message": "too many requests"}, Retry_After="2")
    later = Answer(503, Retry_After="3600")
    client, sent = client_of(
        monkeypatch, tmp_path, {"token": "t"}, busy, later, Answer(200), *[busy] * 5, Answer(429)
    )
    assert client.request("POST", "/x", {}) == {}
    assert waits == [2, 5]
    for _ in range(2):
        with pytest.raises(ConnectError, match=r"too many requests|status 429"):
            client.request("GET", "/x")
    assert len(sent) == 9


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"kind": "Status", "details": {"name": "c-1", "kind": "jobsets"}}, AbsentError),
        ({"kind": "Status", "details": {}}, NotFoundError),
        ("404 page not found", NotFoundError),
    ],
)
def test_a_server_that_does_not_know_the_kind_yet_says_nothing_about_the_object(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: object, kind: type
) -> None:
    """So answers a server that has just started."""
    client, _ = client_of(monkeypatch, tmp_path, {"token": "t"}, Answer(404, body))
    with pytest.raises(NotFoundError) as raised:
        client.request("GET", "/x")
    assert type(raised.value) is kind
    assert bool(raised.value.hint) == (kind is NotFoundError)


def test_a_namespace_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = {"kind": "Status", "details": {"name": "nope", "kind": "namespaces"}}
    client, _ = client_of(monkeypatch, tmp_path, {"token": "t"}, Answer(404, body))
    with pytest.raises(AbsentError) as raised:
        client.request("POST", "/x", {})
    assert "set cluster.kubernetes.namespace" in raised.value.hint


def test_many_logs_that_end_at_the_same_time_print_no_warnings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a handler, Python writes warnings to stderr."""
    client, _ = client_of(monkeypatch, tmp_path, {"token": "t"})
    pool = client._credentials.pool.connection_from_url("http://prod.test")
    for connection in [pool._get_conn() for _ in range(500)]:
        pool._put_conn(connection)
    assert caplog.messages == []


def test_one_thread_renews_an_expired_token_for_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = 8
    barrier = threading.Barrier(count)
    client, _ = client_of(monkeypatch, tmp_path, {"token": "t"})
    used = set()

    def once(*_: object) -> Answer:
        if client._credentials is first:
            barrier.wait(HANG)
            return Answer(401)
        used.add(client._credentials.server)
        return Answer(200)

    first = client._credentials
    monkeypatch.setattr(client, "_once", once)
    loaded = []
    log_in = credentials.log_in
    monkeypatch.setattr(credentials, "log_in", lambda context: loaded.append(1) or log_in(context))
    threads = [threading.Thread(target=client.request, args=("GET", "/x")) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert len(loaded) == len(used) == 1
