"""Notifications, with real programs and a real HTTP server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.runs.folder import RunFolder
from dtrain.runs.request import Request
from dtrain.session.reporting import notifications
from dtrain.session.reporting.notifications import Notifications
from dtrain.session.reporting.notify_program import NotifyError, run
from dtrain.session.reporting.observer import Observer
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.reporting.webhook import post
from dtrain.spec.secrets import url_fault
from support.limits import HANG, until
from support.ports import free_port
from support.threads import no_free_thread
from support.webhook import SECRET, webhook

BODY = b'{"event": "done"}'


def test_a_program_reads_the_report_in_the_folder_of_the_file(tmp_path: Path) -> None:
    script = tmp_path / "notify.sh"
    script.write_text("#!/bin/sh\ncat > got\n")
    script.chmod(0o755)
    run(["./notify.sh"], tmp_path, BODY)
    assert (tmp_path / "got").read_bytes() == BODY
    run(["true"], tmp_path, b"x" * (1 << 20))  # it need not read


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "echo first >&2; echo no mail server >&2; exit 3"], "3: no mail server"),
        (["sh", "-c", "kill -9 $$"], "failed with SIGKILL"),
        (["sh", "-c", "kill -36 $$"], "failed with signal 36"),
        (["./absent"], "cannot run ./absent: No such file or directory"),
    ],
)
def test_a_program_that_fails(tmp_path: Path, command: list[str], words: str) -> None:
    with pytest.raises(NotifyError, match=words):
        run(command, tmp_path, BODY)


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    script = "trap '' TERM; sleep 600 & echo $! $$ > pids; wait"
    pids: list[str] = []
    for limit in (1.0, 10.0):  # a busy machine starts the program late
        if not pids:
            with pytest.raises(NotifyError, match="did not end within"):
                run(["bash", "-c", script], tmp_path, BODY, limit)
            pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
    assert len(pids) == 2
    for pid in pids:
        until(lambda pid=pid: not _runs(pid), "the end of the program")


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_webhook_gets_the_report() -> None:
    with webhook() as server:
        post(server.url, BODY)
    assert server.received == [json.loads(BODY)]


@pytest.mark.parametrize(
    ("status", "silent"), [(404, False), (302, False), (307, False), (0, True)]
)
def test_a_webhook_that_fails(status: int, silent: bool) -> None:
    """No error names the URL. A redirect is not followed."""
    with webhook(status, silent=silent) as server:
        with pytest.raises(NotifyError) as caught:
            post(server.url, BODY, 0.3 if silent else HANG)
        until(lambda: server.received, "the request")  # a busy server reads it late
    assert str(caught.value) in (
        "no answer within 0.3 s",
        f"the server answered with status {status}",
    )
    assert len(server.received) == 1


def test_a_webhook_that_cannot_be_reached() -> None:
    with pytest.raises(NotifyError, match="cannot reach the server: Connection refused"):
        post(f"http://127.0.0.1:{free_port()}/{SECRET}", BODY)


@pytest.mark.parametrize(
    "url",
    [
        "", "file:///etc/passwd", "hooks.example.org/x", "http://", "http://a/b c", "http://[a",
        "http://a:http/x", "https://a:99999/x",
    ],
)  # fmt: skip
def test_a_url_that_is_none(url: str) -> None:
    assert url_fault(url)
    with pytest.raises(NotifyError, match="the URL must"):
        post(url, BODY)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    return RunFolder.create("run-1")


def sender(folder: RunFolder, notify: str, notices: list[str], **secrets: str) -> Notifications:
    job = "{framework: none, command: [x]}"
    text = f"cluster: {{hosts: [a], gpus: 1}}\njob: {job}\nnotify: {notify}"
    request = Request("job.yaml", str(folder.path), text)
    observer = Observer()
    observer.notice = notices.append  # type: ignore[method-assign]
    return Notifications(request, folder, Recorder(folder, observer), secrets)  # type: ignore[arg-type]


def test_each_event_is_sent_once_also_by_the_next_launcher(folder: RunFolder) -> None:
    report = Report(ExitCode.JOB_FAILED, "rank 1 on a exited with status 1", logs=str(folder.path))
    notify, notices = "{on: [failed, restarted], command: [sh, -c, cat >> got; echo >> got]}", []
    events = (("restarted", 1), ("restarted", 2), ("unattended", 3), ("failed", 3), ("done", 3))
    for _ in range(2):
        one = sender(folder, notify, notices)
        for event, attempt in events:
            one.send(event, attempt, report)  # type: ignore[arg-type]
            one.close()
    lines = [json.loads(line) for line in (folder.path / "got").read_text().splitlines()]
    assert [(line["event"], line["attempt"]) for line in lines] == [
        ("restarted", 1),
        ("restarted", 2),
        ("unattended", 3),
        ("failed", 3),
        ("unattended", 3),  # each launcher can leave
    ]
    assert lines[0]["text"] == "run-1 restarted: rank 1 on a exited with status 1"
    assert notices == []


def test_failures_are_notices(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    report = Report(ExitCode.OK, "the worker finished", logs=str(folder.path))
    one = sender(folder, "{command: [./absent]}", notices)
    one.send("done", 1, report)
    one.close()
    monkeypatch.setattr(notifications, "LIMIT", 0.5)
    with webhook(silent=True) as server:
        one = sender(folder, "{webhook: {secret: HOOK}}", notices, HOOK=server.url)
        one.send("done", 2, report)
        one.close()
    assert notices == [
        "notify.command: cannot run ./absent: No such file or directory",
        "notify.webhook: no answer within 0.5 s",
    ]
    one = sender(folder, "{webhook: {secret: HOOK}}", notices)
    one.send("failed", 1, report)
    assert notices[2:] == ["notify.webhook: HOOK is not set in this environment"]
    with no_free_thread(monkeypatch, "dtrain-notify"):
        one = sender(folder, "{command: [./absent]}", notices)
        one.send("failed", 2, report)
        one.close()
    assert notices[3:] == ["notify.command: can't start new thread"]
    assert SECRET not in folder.journal.read_text()
