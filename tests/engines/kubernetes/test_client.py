"""What a launch needs on this machine: the Python package, a kubeconfig, and files that fit."""

from __future__ import annotations

import base64
import io
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from dtrain.diagnostics import AuthError, UsageError
from dtrain.engines.kubernetes import files
from dtrain.engines.kubernetes.client import Client
from dtrain.spec.model import Kubernetes
from dtrain.sync import scan


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UsageError) as raised:
        Client(Kubernetes(image="i"))
    assert raised.value.hint == "pip install 'dtrain[kubernetes]'"


@pytest.mark.parametrize("text", [None, "", "clusters: 3", "a: [", "apiVersion: v1\nkind: Config"])
def test_without_a_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "config"
    if text is not None:
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
        asked.append((client.server, client.namespace))
        return expired

    monkeypatch.setattr(client, "_once", once)
    file.write_text(kubeconfig("dev"))
    with pytest.raises(AuthError, match="expired"):
        client.request("GET", "/version")
    file.write_text("")
    with pytest.raises(AuthError, match="the kubeconfig cannot be used"):
        client.request("GET", "/version")
    assert set(asked) == {("http://prod.test", "of-prod")}


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
