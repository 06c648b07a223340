"""Another user of the host who prepares the folders of a run gains nothing."""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from pathlib import Path

import pytest

from dtrain.node.agent.folder import make_folder
from dtrain.node.agent.wire import RefusedError
from dtrain.node.trust import Trust, UnsafeError
from support.node import Agent, Node
from support.other_users import MALLORY, VICTIM, acting_as, folder_of, give, scratch

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")


def refused(host: Node, agent: Agent, *words: str) -> str:
    body = agent.expect("refused")
    assert agent.wait() == 0
    assert agent.stderr == b""
    host.until_nothing_runs()
    for word in words:
        assert word in body["reason"]
    hint: str = body["hint"]
    return hint


@pytest.fixture
def shared(host: Node) -> Node:
    """A host whose run_dir every user can write to."""
    host.run_dir = scratch(host.run_dir.parent / "scratch")
    return host


def test_a_run_below_a_sticky_folder(shared: Node) -> None:
    agent = shared.start(shared.shell("echo well"))
    agent.wait()
    assert agent.text("worker-0.out") == "well\n"
    for path in (shared.run_dir / "nodes", shared.folder().parent, shared.folder()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["nodes", "nodes/run"])
@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_folders_that_another_user_created(shared: Node, name: str, mode: int) -> None:
    if name != "nodes":
        (shared.run_dir / "nodes").mkdir(0o700)
    planted = folder_of(MALLORY, shared.run_dir / name, mode)
    hint = refused(
        shared,
        shared.launch(shared.shell("exit"), secrets={"KEY": "secret"}),
        str(planted),
        "belongs to bin",
        f"mode {mode:04o}",
    )
    assert "cluster.run_dir" in hint
    assert list(planted.iterdir()) == []


def test_folders_that_are_links(shared: Node, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (shared.run_dir / "nodes").symlink_to(tmp_path / "elsewhere")
    refused(shared, shared.launch(shared.shell("exit")), "nodes is a symbolic link")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_parent_that_its_group_can_write_to(host: Node) -> None:
    lab = folder_of(MALLORY, host.run_dir.parent / "lab", 0o775)
    os.chown(lab, 0, MALLORY.pw_gid)
    agent = host.launch(host.shell("exit"), run_dir=str(lab / "runs"))
    refused(host, agent, str(lab), "group bin", "mode 0775")
    assert list(lab.iterdir()) == []


def test_a_workdir_and_a_script_that_others_can_change(host: Node) -> None:
    script = host.workdir / "train.py"
    script.touch()
    script.chmod(0o646)
    ran = host.workdir / "ran"
    hint = refused(
        host,
        host.launch(host.shell("exit"), script="train.py", setup=[f"touch '{ran}'"]),
        str(script),
        "every user",
    )
    assert f"chmod g-w,o-w {script}" in hint
    assert "job.script" in hint
    assert "job.workdir" not in hint
    give(host.workdir, MALLORY)
    refused(host, host.launch(host.shell("exit")), str(host.workdir), "belongs to bin")
    give(script, MALLORY, 0o644)
    os.chown(host.workdir, 0, 0)
    refused(host, host.launch(host.shell("exit"), script="train.py"), str(script))
    assert not ran.exists()


def test_a_script_that_setup_created(host: Node) -> None:
    setup = ["umask 0; touch train.py"]
    agent = host.launch(host.shell("exit"), script="train.py", setup=setup)
    refused(host, agent, "train.py", "mode 0666")
    assert not host.folder().exists()


def test_a_script_that_comes_and_goes(host: Node) -> None:
    """Another user may rename it between two checks, so a missing script is not safe."""
    theirs = folder_of(MALLORY, host.workdir / "theirs", 0o755)
    agent = host.launch(host.shell("exit"), script="theirs/train.py")
    refused(host, agent, str(theirs), "belongs to bin")


def test_a_script_above_the_target_of_a_link(host: Node, tmp_path: Path) -> None:
    theirs = folder_of(MALLORY, tmp_path / "theirs", 0o755)
    (theirs / "below").mkdir()
    (theirs / "train.py").touch()
    (host.workdir / "link").symlink_to(theirs / "below")
    (host.workdir / "train.py").touch()
    agent = host.launch(host.shell("exit"), script="link/../train.py")
    refused(host, agent, str(theirs), "belongs to bin")


@pytest.mark.parametrize("what", ["fifo", "link", "theirs", "writable"])
def test_a_record_that_another_user_left(host: Node, tmp_path: Path, what: str) -> None:
    """A relay would connect to the socket in it."""
    host.folder().mkdir(parents=True)
    record = host.folder() / "supervisor"
    match what:
        case "fifo":
            os.mkfifo(record)
        case "link":
            (tmp_path / "record").write_text("{}")
            record.symlink_to(tmp_path / "record")
        case _:
            record.write_text("{}")
    give(record, MALLORY) if what == "theirs" else None
    if what == "writable":
        record.chmod(0o666)
    refused(host, host.attach(), str(record))


def test_a_group_that_does_not_exist(host: Node) -> None:
    agent = host.launch(host.shell("exit"), trust_group="no-such-group")
    assert "cluster.trust_group" in refused(host, agent, "no-such-group is not a group")


def test_a_team_shares_a_run_folder() -> None:
    """Each member has a private folder in it. Other users and former members have none."""
    team_group = MALLORY.pw_gid
    with tempfile.TemporaryDirectory() as folder:
        land = Path(folder)
        land.chmod(0o755)
        team = land / "team"
        team.mkdir()
        os.chown(team, 0, team_group)
        team.chmod(0o2770)

        def make(run: str, group: str | None) -> None:
            os.close(make_folder(Trust(group), os.fsencode(team / "run" / "nodes" / run / "n1"))[0])

        with acting_as(MALLORY):
            make("one", "bin")
        with acting_as(VICTIM, team_group):
            make("two", "bin")
            with pytest.raises(PermissionError):
                os.listdir(team / "run" / "nodes" / "one")
            with pytest.raises(RefusedError, match="members of the group bin can write"):
                make("three", None)
        nodes = team / "run" / "nodes"
        found = {
            path.name: (path.stat().st_mode & 0o7777, path.owner()) for path in nodes.iterdir()
        }
        assert found == {"one": (0o700, "bin"), "two": (0o700, "daemon")}
        assert nodes.stat().st_mode & 0o7777 == 0o2770
        with acting_as(VICTIM), pytest.raises(UnsafeError, match="does not belong to"):
            make("four", "bin")  # no longer a member
        # An access list entry does not make another user a member of the team.
        entries = [(1, 7, -1), (2, 7, 54321), (4, 7, -1), (16, 7, -1), (32, 0, -1)]
        data = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        try:
            os.setxattr(nodes, "system.posix_acl_access", data)
        except OSError:
            return  # this file system has no access lists
        with (
            acting_as(VICTIM, team_group),
            pytest.raises(RefusedError, match="user 54321, by an access control list"),
        ):
            make("five", "bin")
