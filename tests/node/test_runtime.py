"""Workers get `dtrain.runtime`, and the relay sends their reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dtrain.node.programs import program
from dtrain.node.runtime_archive import runtime_archive
from support.node import Node

STEP = (
    'echo \'{"event": "progress", "time": 1.5, "step": %s, "total": null, "loss": null,'
    ' "tokens": null, "metrics": {}}\' >> "$DTRAIN_RUN_DIR/rank-0.progress"'
)


def test_workers_import_the_shipped_runtime(host: Node) -> None:
    # The tests' own Python: the runtime needs 3.10, which the agent does not.
    code = "import sys, dtrain.runtime as r; print(r.__file__); r.progress(7); print(sys.path[2])"
    worker = host.process([sys.executable, "-S", "-c", code])
    source = program("agent").replace(
        b"code,files={},{}", b"code,files={},%r" % {"runtime.zip": runtime_archive()}, 1
    )
    own = {"PYTHONPATH": "/my/own"}
    agent = host.start(worker, environment=own, agent=host.agent(source=source))
    agent.expect("bye")
    archive = host.folder() / "runtime.zip"
    assert agent.text("worker-0.out").splitlines() == [
        f"{archive}/dtrain/runtime/__init__.py",
        "/my/own",
    ]
    assert archive.stat().st_mode & 0o777 == 0o600
    said = [body for body in agent.messages if body["type"] == "progress"]
    (report,) = [body for body in said if body["said"]["event"] == "progress"]
    assert (report["name"], report["said"]["step"]) == ("worker-0.progress", 7)


def test_an_installed_dtrain_can_still_be_imported(tmp_path: Path) -> None:
    archive = tmp_path / "runtime.zip"
    archive.write_bytes(runtime_archive())
    code = "import dtrain.runtime as r, dtrain.spec.load as s; print(r.__file__); print(s.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join([str(archive), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    runtime, spec = done.stdout.splitlines()
    assert runtime.startswith(str(archive))
    assert not spec.startswith(str(archive))


def test_no_report_is_sent_twice_or_lost_when_the_relay_is_replaced(host: Node) -> None:
    more = "until test -e go; do sleep 0.02; done"
    script = "; ".join([STEP % 1, STEP % 2, more, STEP % 3, STEP % 4])
    agent = host.start(host.shell(script))
    agent.until(lambda: _steps(agent.messages) == [1, 2])
    agent.kill()
    (host.workdir / "go").touch()
    second = host.attach(offsets=agent.offsets)
    second.expect("bye")
    assert _steps(second.messages) == [3, 4]


def test_invalid_lines_are_ignored(host: Node) -> None:
    noise = 'printf "no json\\n{\\"event\\"" >> "$DTRAIN_RUN_DIR/rank-0.progress"'
    agent = host.start(host.shell("; ".join([STEP % 1, noise])))
    agent.expect("bye")
    assert _steps(agent.messages) == [1]


def _steps(messages: list[dict[str, object]]) -> list[object]:
    return [body["said"]["step"] for body in messages if body["type"] == "progress"]  # type: ignore[index]
