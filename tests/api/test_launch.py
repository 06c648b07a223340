"""`dtrain.launch` in this process, with real jobs on this machine."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

import dtrain
from dtrain.spec import load as spec_load
from support.launching import Scene
from support.limits import HANG, until

TALK = "import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\n"
WAIT = "import os, time\nprint('up', os.environ['RANK'], flush=True)\ntime.sleep(3600)\n"
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise ValueError("bad batch")
time.sleep(3600)
"""


class Watcher:
    """Records the calls of the callbacks, and lets a test wait for a line."""

    def __init__(self) -> None:
        self.lines: list[dtrain.Line] = []
        self.states: list[tuple[str, str, str]] = []
        self.notices: list[str] = []
        self._seen: queue.SimpleQueue[str] = queue.SimpleQueue()

    def on_line(self, line: dtrain.Line) -> None:
        self.lines.append(line)
        self._seen.put(line.text)

    def on_state(self, *state: str) -> None:
        self.states.append(state)  # type: ignore[arg-type]

    @property
    def callbacks(self) -> dict[str, Any]:
        return {
            "on_line": self.on_line,
            "on_state": self.on_state,
            "on_notice": self.notices.append,
        }

    def until(self, text: str) -> None:
        while self._seen.get(timeout=HANG) != text:
            pass


class Background:
    """A launch in a separate thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._result: list[dtrain.Report | BaseException] = []

        def work() -> None:
            try:
                self._result.append(dtrain.launch(*args, **options))
            except BaseException as error:  # noqa: BLE001 - `report` raises it
                self._result.append(error)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def report(self) -> dtrain.Report:
        self._thread.join(HANG)
        (result,) = self._result
        if isinstance(result, BaseException):
            raise result
        return result


def test_a_job_that_succeeds(scene: Scene) -> None:
    watcher = Watcher()
    before = signal.getsignal(signal.SIGINT)
    during: list[Any] = []
    report = dtrain.launch(
        scene.cluster_file(scene.script(TALK)),
        args=["--lr", "1e-3"],
        on_running=lambda run: during.append(signal.getsignal(signal.SIGINT)),
        **watcher.callbacks,
    )
    assert (report.ok, report.exit_code, report.failures) == (True, 0, ())
    assert report.reason == "all 4 workers finished"
    assert sorted(map(str, watcher.lines)) == [
        f"[node{rank // 2} {rank}] rank {rank} --lr 1e-3" for rank in range(4)
    ]
    assert ("node0", "running", "") in watcher.states
    assert watcher.states[-1][1] == "ended"
    assert report.run == scene.run_folder().name
    assert during == [before]
    assert scene.leftovers() == []


def test_a_job_that_fails_is_a_report_and_the_next_launch_works(scene: Scene) -> None:
    report = dtrain.launch(scene.cluster_file(scene.script(FAIL)))
    assert (report.ok, report.exit_code) == (False, dtrain.ExitCode.JOB_FAILED)
    assert report.reason == "rank 1 on node0 exited with status 1"
    assert report.failures[0].message == "ValueError: bad batch"
    again = dtrain.launch(scene.cluster_file(scene.script(TALK)))
    assert again.ok
    assert again.run != report.run
    assert scene.leftovers() == []


ECHO_FIRST = """
import os, signal, time

if os.environ["RANK"] == "1":
    with open("ranks.new", "w") as file:
        print(os.getpid(), os.getppid(), file=file)
    os.rename("ranks.new", "ranks")
    while not os.path.exists("stopped"):
        time.sleep(0.01)
    raise ValueError("bad batch")
while not os.path.exists("ranks"):
    time.sleep(0.01)
rank1, supervisor = map(int, open("ranks").read().split())
os.kill(supervisor, signal.SIGSTOP)
open("stopped", "w").close()
while open(f"/proc/{rank1}/stat").read().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
raise RuntimeError("Connection closed by peer [127.0.0.1]:40000")
"""


def test_the_first_cause_has_one_name_if_its_echo_arrives_first(scene: Scene) -> None:
    notices: list[str] = []

    def on_state(host: str, state: str, detail: str) -> None:
        if host == "node0" and state in ("stopping", "ended"):
            with contextlib.suppress(ProcessLookupError):  # it may have exited since
                os.kill(int((scene.folder / "ranks").read_text().split()[1]), signal.SIGCONT)

    script = scene.script(ECHO_FIRST)
    cluster = scene.cluster_file(script, slots=1, workdir=str(scene.folder))
    report = dtrain.launch(cluster, on_state=on_state, on_notice=notices.append)
    assert report.reason == "rank 1 on node1 exited with status 1"
    (shown,) = [notice for notice in notices if "stopping the other workers" in notice]
    assert shown == f"{report.reason}; stopping the other workers"


def test_a_worker_that_fails_alone_stops_no_others(scene: Scene) -> None:
    notices: list[str] = []
    cluster = scene.cluster_file(scene.script("raise SystemExit(3)"), hosts=1, slots=1)
    report = dtrain.launch(cluster, on_notice=notices.append)
    assert report.reason in notices
    assert "other workers" not in "".join(notices)


def test_stop_from_another_thread(scene: Scene) -> None:
    watcher, control = Watcher(), dtrain.Control()
    launch = Background(
        scene.cluster_file(scene.script(WAIT)), control=control, **watcher.callbacks
    )
    watcher.until("up 3")
    control.stop("enough")
    report = launch.report()
    assert (report.exit_code, report.reason) == (dtrain.ExitCode.INTERRUPTED, "enough")
    assert scene.leftovers() == []


def test_a_stopped_control_starts_nothing(scene: Scene) -> None:
    control = dtrain.Control()
    control.stop("enough")
    marker = scene.folder / "started"
    report = dtrain.launch(
        scene.cluster_file(scene.script(f"open({str(marker)!r}, 'w')\n")), control=control
    )
    assert (report.exit_code, report.reason) == (dtrain.ExitCode.INTERRUPTED, "enough")
    assert not marker.exists()


def test_a_callback_that_raises_stops_the_job(scene: Scene) -> None:
    def on_line(line: dtrain.Line) -> None:
        raise LookupError(line.text)

    with pytest.raises(LookupError, match="up"):
        dtrain.launch(scene.cluster_file(scene.script(WAIT)), on_line=on_line)
    status = dtrain.LaunchedRun(scene.run_folder().name).status()
    assert status.report is not None
    assert status.report.reason.startswith("a callback failed: LookupError: up")
    assert scene.leftovers() == []


def test_signals_stop_the_job_when_asked(scene: Scene) -> None:
    def on_running(run: str) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    report = dtrain.launch(
        scene.cluster_file(scene.script(WAIT)), signals=True, on_running=on_running
    )
    assert (report.exit_code, report.reason) == (dtrain.ExitCode.INTERRUPTED, "Ctrl-C")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_stops_the_job_and_is_raised_after_its_end(scene: Scene) -> None:
    def on_running(run: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        dtrain.launch(scene.cluster_file(scene.script(WAIT)), on_running=on_running)
    status = dtrain.LaunchedRun(scene.run_folder().name).status()
    assert status.report is not None and status.report.reason == "Ctrl-C"
    assert scene.leftovers() == []


def test_ctrl_c_during_a_wait_leaves_the_job_running(scene: Scene) -> None:
    def press() -> None:
        until(lambda: run.status().in_charge == os.getpid(), "this process to take over")
        os.kill(os.getpid(), signal.SIGINT)

    run = dtrain.launch(scene.cluster_file(scene.script(WAIT)), detach=True)
    launcher = run.status().in_charge
    assert launcher is not None
    os.kill(launcher, signal.SIGKILL)
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert {host.state for host in run.status(ask_hosts=True).hosts.values()} == {"running"}
    assert run.stop().reason == "dtrain stop"


def test_signals_need_the_main_thread(scene: Scene) -> None:
    launch = Background(scene.cluster_file(scene.script(TALK)), signals=True)
    with pytest.raises(dtrain.UsageError, match="main thread"):
        launch.report()
    assert not scene.home.exists()


def test_dtrain_stop_does_not_signal_a_process_without_handlers(scene: Scene) -> None:
    watcher = Watcher()
    launch = Background(scene.cluster_file(scene.script(WAIT)), **watcher.callbacks)
    watcher.until("up 0")
    # A signal would end the process that runs this test.
    done = scene.command("stop", scene.run_folder().name).wait()
    assert done.code == 0, str(done)
    report = launch.report()
    assert (report.exit_code, report.reason) == (dtrain.ExitCode.INTERRUPTED, "dtrain stop")
    assert scene.leftovers() == []


def test_detach_and_stop(scene: Scene) -> None:
    run = dtrain.launch(scene.cluster_file(scene.script(WAIT)), detach=True)
    status = run.status()
    assert status.state == "running"
    assert status.in_charge not in (None, os.getpid())
    with pytest.raises(TimeoutError):
        run.wait(timeout=0.1)
    # They are forked when the launch returns, and may not be executed yet.
    until(lambda: len(scene.leftovers()) >= 4, "the workers")
    report = run.stop()
    assert report.exit_code is dtrain.ExitCode.INTERRUPTED
    assert run.wait() == report
    assert run.status().state == "stopped"
    assert scene.leftovers() == []


def test_one_command_stops_several_runs(scene: Scene) -> None:
    """Also those after a name that no run has."""
    cluster = scene.cluster_file(scene.script(WAIT))
    runs = [dtrain.launch(cluster, detach=True) for _ in range(2)]
    done = scene.command("stop", runs[0].name, "other", runs[1].name).wait()
    assert done.code == 2, str(done)
    assert "error: no run 'other' on this machine" in done.stderr
    assert [run.status().state for run in runs] == ["stopped", "stopped"]
    assert scene.leftovers() == []


def test_detach_and_wait(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = scene.folder / "gate"
    text = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
    text += "assert os.environ['KEY'] == 'from the caller'\n"
    cluster = scene.cluster_file(scene.script(text), secrets=["KEY"])
    monkeypatch.delenv("KEY", raising=False)
    run = dtrain.launch(cluster, detach=True, secrets={"KEY": "from the caller"})
    gate.touch()
    report = run.wait()
    assert report.ok, report
    assert dtrain.LaunchedRun(run.name).wait() == report


def test_a_detached_launch_that_cannot_start(scene: Scene) -> None:
    scene.home.write_text("a file is in the way")
    with pytest.raises(dtrain.DtrainError, match="a file is in the way"):
        dtrain.launch(scene.cluster_file(scene.script(TALK)), detach=True)


def test_this_machine_cannot_store_the_run(scene: Scene) -> None:
    scene.home.write_text("a file is in the way")
    report = dtrain.launch(scene.cluster_file(scene.script(TALK)))
    assert report.exit_code is dtrain.ExitCode.NODE_FAILED
    assert report.reason.endswith(f"a file is in the way: {scene.home}")
    assert "DTRAIN_HOME" in report.hint


def test_wrong_input(scene: Scene) -> None:
    cluster = scene.cluster_file(scene.script(TALK), secrets=["MISSING"])
    with pytest.raises(dtrain.UsageError, match="MISSING"):
        dtrain.launch(cluster)
    with pytest.raises(dtrain.UsageError, match="no file"):
        dtrain.launch(scene.folder / "absent.yaml")
    with pytest.raises(dtrain.UsageError, match="args must be a list, not '--lr 1'") as wrong:
        dtrain.load(cluster, args="--lr 1")
    assert wrong.value.hint == "args=['--lr', '1']"
    with pytest.raises(dtrain.UsageError, match="settings must be a list") as wrong:
        dtrain.load(cluster, settings="job.args=[--lr, 1]")
    assert wrong.value.hint == "settings=['job.args=[--lr, 1]']"
    with pytest.raises(dtrain.UsageError, match="argv must be a list"):
        dtrain.execute(cluster, "nvidia-smi -L")
    with pytest.raises(dtrain.UsageError, match="no callbacks"):
        dtrain.launch(cluster, detach=True, control=dtrain.Control())  # type: ignore[call-overload]
    assert not scene.home.exists()


def test_a_spec_built_in_python(scene: Scene) -> None:
    document = yaml.safe_load(scene.cluster_file(scene.script(TALK)).read_text())
    document["job"]["script"] = Path("script.py")
    document["job"]["args"] = ("on", "1e3", "é")
    watcher = Watcher()
    report = dtrain.launch(dtrain.load(document, folder=scene.folder), **watcher.callbacks)
    assert report.ok, report
    assert {line.text.partition(" ")[2][2:] for line in watcher.lines} == {"on 1e3 é"}


def test_an_invalid_spec_names_the_key() -> None:
    document = {"cluster": {"hosts": ["a"], "gpuss": 8}, "job": {"script": "x.py"}}
    with pytest.raises(dtrain.SpecError) as caught:
        dtrain.load(document)
    assert any("gpuss" in problem.message for problem in caught.value.problems)
    with pytest.raises(dtrain.UsageError, match="type set"):
        dtrain.load({"cluster": {"hosts": {"a"}}})


def test_a_launch_parses_its_file_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    compose = spec_load.compose

    def counted(source: Any, file: str, settings: Any) -> Any:
        parsed.append(file)
        return compose(source, file, settings)

    monkeypatch.setattr(spec_load, "compose", counted)
    cluster = scene.cluster_file(scene.script(TALK))
    assert dtrain.launch(cluster).ok
    assert parsed == [str(cluster)]


def test_a_command_runs_on_all_hosts(scene: Scene) -> None:
    outcomes = dtrain.execute(scene.cluster_file(scene.script("")), ["exit 3"])
    assert {outcome.code for outcome in outcomes} == {3}


def test_import_is_light() -> None:
    code = "import sys, dtrain; print([m for m in sys.modules if m.startswith('dtrain.')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    code = "import sys, dtrain; dtrain.launch, dtrain.load; print('paramiko' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_every_public_name_exists() -> None:
    assert all(getattr(dtrain, name) is not None for name in dtrain.__all__)
    assert set(dtrain.__all__) <= set(dir(dtrain))
    with pytest.raises(AttributeError):
        dtrain.absent  # noqa: B018
