"""The Git commit of a job's code, from real repositories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dtrain.node.agent.sweep import start_helper
from dtrain.node.revision import revision
from support.repository import committed, git


def found(folder: Path) -> dict[str, Any] | None:
    return revision(os.fsencode(folder))


def on_node(folder: Path) -> dict[str, Any] | None:
    """As the agent finds it."""
    return revision(os.fsencode(folder), start_helper)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("train.py", "model.py", "old name.py"):
        (tmp_path / name).write_text(f"print({name!r})\n" * 20)
    committed(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path


def test_a_clean_repository(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "loss.png").write_bytes(b"output")
    known = {"commit": commit, "changed": [], "more": 0, "digest": ""}
    assert found(repository) == found(repository / "configs") == known


def test_changed_renamed_removed_and_new_files(repository: Path) -> None:
    git(repository, "mv", "old name.py", "new name é.py")
    (repository / "train.py").write_text("changed")
    (repository / "model.py").unlink()
    (repository / "layers.py").write_text("new")
    known = found(repository / "configs")
    assert known is not None
    assert sorted(known["changed"]) == ["layers.py", "model.py", "new name é.py", "train.py"]
    (repository / "train.py").write_text("CHANGED")
    other = found(repository)
    assert other is not None
    assert other["digest"] != known["digest"]
    assert {**other, "digest": known["digest"]} == known


def test_a_new_folder_with_python_files(repository: Path) -> None:
    (repository / "outputs" / "step 1").mkdir(parents=True)
    (repository / "outputs" / "step 1" / "config.json").write_text("{}")
    (repository / "losses" / "old").mkdir(parents=True)
    digests = set()
    for text in ("one", "two"):
        (repository / "losses" / "old" / "focal.py").write_text(text)
        known = found(repository)
        assert known is not None
        assert known["changed"] == ["losses/"]
        digests.add(known["digest"])
    assert len(digests) == 2


def test_changes_in_a_submodule(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    library = tmp_path_factory.mktemp("library")
    (library / "layers.py").write_text("")
    committed(library)
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", str(library), "library")
    git(repository, "commit", "-q", "-m", "second")
    digests = set()
    for text in ("one", "two"):
        (repository / "library" / "layers.py").write_text(text)
        known = found(repository)
        assert known is not None
        assert known["changed"] == ["library"]
        digests.add(known["digest"])
    assert len(digests) == 2


def test_what_cannot_be_read_counts_as_changed(repository: Path) -> None:
    (repository / "train.py").unlink()
    os.mkfifo(repository / "train.py")
    (repository / "model.py").unlink()
    (repository / "model.py").symlink_to("/nowhere")
    known = found(repository)
    assert known is not None
    assert known["changed"] == ["model.py", "train.py"]


def test_many_changed_files(repository: Path) -> None:
    for number in range(150):
        (repository / f"{number}.py").write_text("new")
    known = found(repository)
    assert known is not None
    assert (len(known["changed"]), known["more"]) == (100, 50)


def test_nothing_is_known_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("new")
    assert found(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found(tmp_path) is None


def test_a_git_that_hangs_is_ended_with_its_children(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, wrapper = tmp_path / "held", tmp_path / "bin" / "git"
    os.mkfifo(held)
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\nexec 9>{held}\nsleep 600\n")
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("dtrain.node.revision.GIT_SECONDS", 0.5)
    assert found(repository) is None
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # when the last process with the other end has ended
    os.close(reader)


def test_variables_of_a_hook_do_not_count(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = found(repository)
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert found(repository) == on_node(repository) == known is not None


def test_the_file_monitor_of_a_repository_does_not_run(repository: Path) -> None:
    ran = repository / "ran"
    monitor = repository / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {ran}\n")
    monitor.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(monitor))
    assert found(repository) is not None
    assert not ran.exists()
