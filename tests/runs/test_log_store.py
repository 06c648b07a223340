"""The run's folder: exact bytes, private files, errors that name the file."""

import os
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.launchplan.build import build
from dtrain.messages.decode import ProtocolError
from dtrain.runs.events import RunStarted
from dtrain.runs.folder import Holder, RunFolder
from dtrain.runs.journal import Journal, JournalReader
from dtrain.runs.log_store import LogWriter, tail
from dtrain.runs.record import Record
from dtrain.runs.storage import StorageError, home, storing
from dtrain.spec.load import parse
from support.other_users import MALLORY, folder_of, give, scratch


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "state"))
    return RunFolder.create("run-1")


def stream(folder, name="worker-0.out", host="gpu01"):
    return folder.stream(host, name, ranked=True)


def test_layout_and_permissions(folder):
    writer = LogWriter(stream(folder))
    writer.append(0, b"hi")
    assert folder.path == home() / "runs" / "run-1"
    assert stream(folder).path == folder.path / "logs/gpu01/worker-0.out"
    for path in (home(), folder.path, folder.logs, folder.logs / "gpu01"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert writer.path.stat().st_mode & 0o777 == 0o600
    assert folder.journal.parent == folder.path
    assert RunFolder.find("run-1") == RunFolder.find("ru") == folder
    assert RunFolder.all() == [folder]


def test_only_workers_of_a_job_with_ranks_have_one(folder):
    names = ("worker-1.out", "rank-3.err", "torchrun-0.out")
    assert [stream(folder, name).rank for name in names] == [1, 3, None]
    assert folder.stream("gpu01", "worker-1.out", ranked=False).rank is None


def test_a_run_has_a_separate_folder(folder):
    with pytest.raises(FileExistsError):
        RunFolder.create("run-1")


def test_a_hole_of_a_log_takes_no_space(folder):
    writer, size = LogWriter(stream(folder)), 8 << 20
    writer.append(0, b"before")
    writer.append(6, bytes(size))
    assert writer.path.stat().st_size == 6 + size
    writer.append(0, bytes(6))  # stored already
    writer.append(6 + size, b"after")
    assert writer.path.read_bytes() == b"before" + bytes(size) + b"after"
    assert writer.path.stat().st_blocks * 512 < size


def test_a_hole_that_cannot_be_stored_may_come_again(folder):
    writer = LogWriter(stream(folder))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(StorageError):
            writer.append(0, bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert writer.size == 0
    assert writer.append(0, bytes(1 << 17)) == writer.path.stat().st_size == 1 << 17


@pytest.mark.parametrize("run", ["nope", "../run-1", "", ".", "a/b", "run-1\n"])
def test_unknown_runs(folder, run):
    with pytest.raises(UsageError) as caught:
        RunFolder.find(run)
    assert "dtrain ps" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        RunFolder.find("run.yaml")
    assert caught.value.hint.startswith("name a run, not a file: ")


def test_a_name_that_several_runs_begin_with(folder):
    RunFolder.create("run-2")
    assert RunFolder.find("run-2").name == "run-2"
    with pytest.raises(UsageError, match="2 runs begin with 'run'"):
        RunFolder.find("run")


def test_the_name_of_a_job_means_its_latest_run(folder):
    for name in ("long-20261125-235241-00000a", "long-20261124-235241-00000b", "long-er-1"):
        RunFolder.create(name)
    assert RunFolder.find("long").name == "long-20261125-235241-00000a"
    with pytest.raises(UsageError, match="3 runs begin with 'lon'"):
        RunFolder.find("lon")


def test_one_process_at_a_time_is_in_charge(folder):
    claim = folder.claim()
    assert folder.in_charge() == os.getpid()
    assert folder.holder() == Holder(os.getpid())
    assert folder.claim() is None
    claim.close()
    assert folder.in_charge() is None
    folder.claim().close()


def test_a_launcher_may_be_the_first_process_of_its_container(folder, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    claim = folder.claim()
    assert folder.holder() == Holder(1)
    for damaged in ("1\n\n", "0\nm boot pid:[1]\n", "4194305\nm boot pid:[1]\n"):
        (folder.path / "launcher").write_text(damaged)
        assert folder.holder() is None
    claim.close()


def test_a_forked_process_is_not_in_charge_of_the_run_of_another_one(folder):
    claim = folder.claim()
    inherited = os.dup(claim._fd)  # as fork does
    claim.close()
    try:
        assert folder.in_charge() is None
    finally:
        os.close(inherited)


def test_each_attempt_has_its_own_logs(folder):
    second = replace(folder, attempt=2)
    assert stream(second).path == folder.path / "logs-2/gpu01/worker-0.out"
    LogWriter(stream(second)).append(0, b"x")
    assert second.logs.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("..", "worker-0.out"),
        ("a/b", "worker-0.out"),
        ("", "worker-0.out"),
        ("gpu01", "../../x.out"),
        ("gpu01", "worker-0"),
        ("gpu01", "worker-0.out\n"),
    ],
)
def test_names_from_outside_stay_inside(folder, host, name):
    with pytest.raises(ValueError, match="not "):
        stream(folder, name, host)


def test_fd_follows_from_the_name(folder):
    assert stream(folder, "rank-12.err").fd == "stderr"
    assert stream(folder, "chief-0.out").fd == "stdout"


def test_streams_come_by_node_rank_and_number(folder):
    plan = build(
        parse("cluster: {hosts: [b, a], gpus: 1}\njob: {framework: torch, script: t}\n", "f")
    )
    names = ["worker-2.out", "worker-2.err", "worker-10.out"]
    for host in ("a", "b"):
        for name in reversed(names):
            LogWriter(stream(folder, name, host)).append(0, b"x")
    found = [(one.host, one.path.name) for one in folder.sizes(plan)]
    assert found == [(host, name) for host in ("b", "a") for name in names]


def test_overlap_is_cut_and_a_gap_refused(folder):
    writer = LogWriter(stream(folder))
    assert writer.append(0, b"hello ") == 6
    assert writer.append(3, b"lo world") == 11
    assert writer.append(0, b"hello") == 11
    with pytest.raises(ProtocolError, match="11 to 12"):
        writer.append(12, b"!")
    assert writer.path.read_bytes() == b"hello world"
    assert LogWriter(stream(folder)).size == 11


@given(
    data=st.binary(max_size=300),
    cuts=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=30),
)
def test_pieces_sent_again_give_the_same_bytes(tmp_path_factory, data, cuts):
    path = tmp_path_factory.mktemp("pieces")
    (path / "logs").mkdir()
    writer = LogWriter(RunFolder(path).stream("h", "worker-0.out", ranked=True))
    for back, length in cuts:
        start = max(0, writer.size - back)
        assert writer.append(start, data[start : start + length]) <= len(data)
    writer.append(writer.size, data[writer.size :])
    assert writer.path.read_bytes() == data


def test_two_launchers_following_one_run_write_it_once(folder):
    first, second = LogWriter(stream(folder)), LogWriter(stream(folder))
    data = os.urandom(5000)
    first.append(0, data[:3000])
    second.append(0, data[:1000])
    second.append(1000, data[1000:])
    first.append(3000, data[3000:])
    assert first.path.read_bytes() == data


def test_more_streams_than_open_files(folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_already = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_already + 20, hard))
    try:
        writers = [LogWriter(stream(folder, f"worker-{number}.out")) for number in range(200)]
        for writer in writers:
            writer.append(0, b"x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_threads(folder):
    data = os.urandom(1 << 16)

    def write(number: int) -> None:
        writer = LogWriter(stream(folder, f"worker-{number}.out"))
        for start in range(0, len(data), 1000):
            writer.append(start, data[start : start + 1000])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = sorted(folder.logs.rglob("*.out"))
    assert len(files) == 16
    assert all(file.read_bytes() == data for file in files)


def test_a_full_disk_names_file_and_remedy(folder):
    writer = LogWriter(stream(folder))
    writer.append(0, b"before")
    file, writer.path = writer.path, Path("/dev/full")
    with pytest.raises(StorageError, match=r"/dev/full.*No space left") as caught:
        writer.append(6, b"more")
    assert "free some space" in caught.value.hint
    assert caught.value.exit_code is ExitCode.NODE_FAILED
    writer.path = file
    assert writer.append(6, b"more") == 10
    assert writer.path.read_bytes() == b"beforemore"


def test_a_full_table_of_open_files_is_no_fault_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(StorageError, match="Too many open files") as caught:
            RunFolder.create("run-1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "ulimit -n" in caught.value.hint


def test_a_file_that_the_user_removes_or_empties_during_the_run_continues(folder):
    writer = LogWriter(stream(folder))
    writer.append(0, b"old ")
    assert writer.is_within_line(4)
    writer.path.unlink()
    assert not writer.is_within_line(4)
    writer.append(4, b"new ")
    writer.path.write_bytes(b"")
    assert not writer.is_within_line(8)
    # A new connection, on which the host continues behind what has arrived.
    writer = LogWriter(stream(folder), arrived=8)
    writer.append(8, b"newest")
    assert writer.path.read_bytes() == bytes(8) + b"newest"


def test_a_removed_folder_is_reported(folder):
    writer = LogWriter(stream(folder))
    shutil.rmtree(folder.path)
    with pytest.raises(StorageError, match="worker-0") as caught:
        writer.append(0, b"x")
    assert "removed" in caught.value.hint


def test_a_file_in_the_way(tmp_path, monkeypatch):
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "state"))
    with pytest.raises(StorageError, match="state") as caught:
        RunFolder.create("run-1")
    assert "DTRAIN_HOME" in caught.value.hint


def test_tail(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    assert tail(path, 4) == b"6789"
    assert tail(path, 100) == b"0123456789"
    assert tail(tmp_path / "missing", 4) == b""


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as other users")


@needs_root
@pytest.mark.parametrize("name", ["home", "home/runs", "home/runs/run-1"])
def test_folders_that_another_user_made_before(tmp_path, monkeypatch, name):
    shared = scratch(tmp_path / "scratch")
    monkeypatch.setenv("DTRAIN_HOME", str(shared / "home"))
    planted = folder_of(MALLORY, shared / name)
    uses = [lambda: RunFolder.find("run-1")]
    if planted.name != "run-1":
        uses += [lambda: RunFolder.create("run-2"), RunFolder.all]
    for use in uses:
        with pytest.raises(StorageError, match="belongs to bin") as caught:
            use()
        assert str(planted) in str(caught.value)
        assert "DTRAIN_HOME" in caught.value.hint
    assert list(planted.iterdir()) == []


@needs_root
@pytest.mark.parametrize("what", ["fifo", "link", "theirs", "writable"])
def test_files_that_another_user_can_change(folder, tmp_path, what):
    precious = tmp_path / "precious"
    precious.write_text("{}")
    for name in ("launcher", "run.json", "journal.jsonl"):
        file = folder.path / name
        match what:
            case "fifo":
                os.mkfifo(file)
            case "link":
                file.symlink_to(precious)
            case "theirs":
                file.touch()
                give(file, MALLORY)
            case "writable":
                file.touch()
                file.chmod(0o666)
    for use in (folder.claim, folder.in_charge):
        with pytest.raises(StorageError, match="launcher"):
            use()
    with pytest.raises(UsageError, match=r"run\.json"):
        Record.load(folder.path)
    with pytest.raises(UsageError, match=r"journal\.jsonl"):
        list(JournalReader(folder.journal).read())
    Journal(folder.journal).write(0.0, RunStarted(("a",)))
    assert precious.read_text() == "{}"


def test_a_home_folder_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("DTRAIN_HOME", "~nobody-here/runs")
    with pytest.raises(UsageError, match="~nobody-here/runs: this machine has no such home"):
        RunFolder.all()


def test_a_home_folder_that_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """As below /home with autofs, where mkdir says that there is no such file."""
    monkeypatch.setenv("DTRAIN_HOME", "/proc/nobody/.dtrain")
    with pytest.raises(StorageError) as caught, storing(home() / "runs"):
        (home() / "runs").mkdir()
    assert caught.value.hint == "name a folder that you can write to in DTRAIN_HOME"
