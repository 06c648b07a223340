"""What a launch exports: OpenMetrics over HTTP and in a file, and TensorBoard scalars."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as node_exporter

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.failures.cause import Report
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.launchplan.build import build
from dtrain.messages.telemetry import GpuSample, RankUse, Sample
from dtrain.runs import events, journal
from dtrain.runs.folder import RunFolder
from dtrain.runs.progress import Progress
from dtrain.spec.load import parse_once
from dtrain_cli import export
from dtrain_cli.export import Exports, metrics_server
from dtrain_cli.export.scalars import Scalars
from support import warm
from support.limits import HANG
from support.ports import free_port

SPEC = 'cluster: {hosts: [n1, "n2"], gpus: 1}\njob: {framework: torch, script: train.py}\n'
HOSTILE = 'a"b\\c\nd'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(export, "PERIOD", 0.05)
    return RunFolder.create("run-1")


def play(exports: Exports, folder: RunFolder) -> None:
    """Two hosts do three steps of 10 s, after a start of 10 s."""
    gpu = GpuSample(0, 87.5, 2048, 81920, 500, 700, 60, 1400, 1980, 0x40, 0, None)
    exports.on_event(
        events.RunLaunched("run-1", build(parse_once(SPEC, "c.yaml")), str(folder.path))
    )
    for host, rank in (("n1", "rank-0"), ("n2", "rank-1")):
        exports.on_event(events.HostState(host, "running"))
        used = (RankUse(rank, None, 4096, 12),)
        exports.on_event(
            events.Sampled(
                host,
                Sample(
                    1e9, 8, 2.0, (10, 100), None, (5.0, 6.0), None, (gpu,), used, round_trip=0.5
                ),
            )
        )
    slow = Straggler(("rank-1",), ("n2",), False, 0.2, "clock", 3)
    exports.on_event(events.StragglersChanged(slow))
    exports.on_event(events.StallChanged(Stall(("rank-0",), ("n1",), 20.0, 3, 1)))
    written: list[tuple[float, events.JournalEvent]] = [(1e9, events.RunStarted(("n1", "n2")))]
    for step in (1, 2, 3):
        at = 1e9 + 10 * step
        for rank in (0, 1):
            metrics = {HOSTILE: 0.5, "grad_norm": float("nan")}
            report = Progress(f"rank-{rank}", at, step, 3, 1.5 / step, 1000 * step, metrics)
            exports.on_event(events.ProgressReported(f"n{rank + 1}", report))
        written.append((at, events.Progressed(Progress("rank-0", at, step, 3, 1.5, None, {}))))
    written.append((1e9 + 30, events.Finished(Report(ExitCode.OK, "done"))))
    folder.journal.write_bytes(b"".join(journal.encode(at, event) for at, event in written))
    folder.journal.chmod(0o600)


def get(address: str, path: str) -> tuple[str, str]:
    """The type and the text of a page."""
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=HANG)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.headers["Content-Type"], answer.read().decode()


def values(families: Iterable[object]) -> dict[tuple[str, str, str], float]:
    """The value by name, host and rank or other label."""
    found = {}
    for family in families:
        for sample in family.samples:  # type: ignore[attr-defined]
            labels = dict(sample.labels)
            assert labels.pop("run") == "run-1"
            host = labels.pop("host", "")
            found[sample.name, host, " ".join(labels.values())] = sample.value
    return found


def test_metrics_are_served_and_kept_in_a_file(folder: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    with Exports("0", file) as exports:
        play(exports, folder)
        kind, text = get(exports.address, "/metrics")
        assert kind.startswith("application/openmetrics-text; version=1.0.0")
        served = values(openmetrics(text))
        assert "404" in get(exports.address, "/secrets")[1]
        with pytest.raises(UsageError, match="cannot listen"):
            Exports(exports.address.split("/")[2])
    assert exports.address.startswith("http://127.0.0.1:")
    assert served["dtrain_gpu_use_ratio", "n2", "0"] == 0.875
    assert served["dtrain_gpu_memory_used_bytes", "n1", "0"] == 2**31
    assert served["dtrain_rank_memory_bytes", "n2", "1"] == 4096
    assert served["dtrain_gpu_throttle_reasons", "n1", "0"] == 0x40
    assert served["dtrain_round_trip_seconds", "n2", ""] == 0.0005
    assert served["dtrain_slow_rank", "", "1 clock"] == 1
    assert served["dtrain_standing_rank", "", "0"] == 1
    assert served["dtrain_host_state", "n1", "running"] == 1
    assert served["dtrain_step", "", "1"] == 3
    assert served["dtrain_loss", "", "0"] == 0.5
    assert served["dtrain_tokens_per_second", "", ""] == 100
    assert served["dtrain_metric", "", f"0 {HOSTILE}"] == 0.5
    text = file.read_text()
    for read in (openmetrics, node_exporter):
        kept = values(read(text))
        assert kept["dtrain_goodput_ratio", "", ""] == pytest.approx(2 / 3, abs=0.01)
        assert kept["dtrain_time_seconds", "", "start"] == pytest.approx(10)
    Exports(None, file)  # replaces the file of an earlier run
    assert [path.name for path in tmp_path.iterdir() if "prom" in path.name] == ["run.prom"]


def test_what_an_earlier_attempt_or_a_queued_job_had_is_exported_no_more(folder: RunFolder) -> None:
    plan = build(parse_once(SPEC, "c.yaml"))
    with Exports("0") as exports:
        play(exports, folder)
        assert "tokens_per_second" in get(exports.address, "/metrics")[1]
        exports.on_event(events.AttemptPlanned(replace(plan, attempt=2)))
        assert "tokens_per_second" not in get(exports.address, "/metrics")[1]
        exports.on_event(events.HostState("host 0 of slurm", "queued"))
        assert "queued" in get(exports.address, "/metrics")[1]
        exports.on_event(events.HostsPlanned(plan))
        assert "queued" not in get(exports.address, "/metrics")[1]


@contextlib.contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    port = int(address.split(":")[2].removesuffix("/metrics"))
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as client:
        yield client


def test_a_client_that_sends_no_request_delays_neither_others_nor_the_end() -> None:
    limit = 2 * HANG
    with pytest.MonkeyPatch.context() as patch, Exports("0") as exports:
        patch.setattr(metrics_server, "CLIENT_LIMIT", limit)
        patch.setattr(metrics_server._Handler, "timeout", limit)
        with connected(exports.address):
            assert get(exports.address, "/metrics")[1].endswith("# EOF\n")
            exports.__exit__()


def test_too_many_clients_at_once_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CLIENT_LIMIT", 2 * HANG)
    monkeypatch.setattr(metrics_server._Handler, "timeout", 2 * HANG)
    with Exports("0") as exports:
        for _ in range(metrics_server.MOST_CLIENTS + 1):  # not at once
            assert get(exports.address, "/metrics")[1].endswith("# EOF\n")
    monkeypatch.setattr(metrics_server, "MOST_CLIENTS", 1)
    with Exports("0") as exports, contextlib.ExitStack() as clients:
        first, second = (clients.enter_context(connected(exports.address)) for _ in range(2))
        assert second.recv(1) == b""
        first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert first.recv(64).startswith(b"HTTP/1.0 200 ")


def test_a_client_that_never_ends_its_request_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "CLIENT_LIMIT", 0.2)
    disconnected = contextlib.suppress(BrokenPipeError, ConnectionResetError)
    with Exports("0") as exports, connected(exports.address) as client, disconnected:
        while True:
            client.sendall(b"x")  # begins the timeout of a read again


def test_a_web_page_cannot_read_the_metrics_by_a_name_of_its_own_for_this_machine() -> None:
    """DNS rebinding: the browser sends the name of the page."""
    with Exports("0") as exports:
        port = int(exports.address.split(":")[2].removesuffix("/metrics"))
        found = {}
        for name in ("evil.example", "[", "localhost", "127.0.0.1", "[::1]"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
            with contextlib.closing(connection):
                connection.request("GET", "/metrics", headers={"Host": f"{name}:{port}"})
                found[name] = connection.getresponse().status
    assert found == {
        **dict.fromkeys(("evil.example", "["), 403),
        **dict.fromkeys(("localhost", "127.0.0.1", "[::1]"), 200),
    }
    with Exports("0.0.0.0:0") as exports, connected(exports.address) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nHost: launcher.example\r\n\r\n")
        assert b" 200 " in client.recv(64)


def test_the_next_launch_takes_the_port_at_once() -> None:
    port = str(free_port())  # the system gives it to no connection in between
    with Exports(port) as exports:
        address = exports.address
        # The server closes the connection first, which keeps the port busy for a minute.
        with socket.create_connection(("127.0.0.1", int(port)), timeout=HANG) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while client.recv(4096):
                pass
    with Exports(port) as exports:
        assert exports.address == address


def test_tensorboard_reads_the_scalars_of_the_first_rank(folder: RunFolder, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Exports(scalars=tmp_path / "scalars") as exports:
        play(exports, folder)
    found = EventAccumulator(str(tmp_path / "scalars" / "run-1")).Reload()
    losses = [(one.step, one.value) for one in found.Scalars("loss")]
    assert losses == [(1, 1.5), (2, 0.75), (3, 0.5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
        with pytest.raises(UsageError, match="needs the package tensorboard"):
            Exports(scalars=tmp_path)
    assert [one.wall_time for one in found.Scalars("tokens_per_second")] == [1e9 + 20, 1e9 + 30]


@pytest.mark.tensorflow
def test_the_export_of_scalars_does_not_load_tensorflow(tmp_path: Path) -> None:
    """It would take seconds, and write its log below a dashboard."""
    program = f"""\
import sys
from pathlib import Path
from dtrain.runs.progress import Progress
from dtrain_cli.export.scalars import Scalars, check_scalars
folder = Path({str(tmp_path)!r})
check_scalars(folder)
scalars = Scalars(folder)
scalars.add(Progress("rank-0", 1e9, 4, 4, 0.25, 4000, {{}}), {{"loss": 0.25}})
scalars.write()
assert list(folder.iterdir())
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_that_this_process_takes_over_is_exported_once(
    folder: RunFolder, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = tmp_path / "run.prom"
    with Exports(file=file, scalars=tmp_path / "scalars") as exports:
        play(exports, folder)
        exports._count_goodput()
        exports.on_event(
            events.RunAttached("run-1", build(parse_once(SPEC, "c.yaml")), str(folder.path))
        )
        exports.on_event(
            events.ProgressReported("n1", Progress("rank-0", 1e9 + 40, 4, 4, 0.25, 4000, {}))
        )
    assert values(openmetrics(file.read_text()))["dtrain_time_seconds", "", "start"] == 10
    found = EventAccumulator(str(tmp_path / "scalars" / "run-1")).Reload()
    assert [one.step for one in found.Scalars("loss")] == [1, 2, 3, 4]
    assert len(list((tmp_path / "scalars" / "run-1").iterdir())) == 1
    assert not {"dtrain_slow_rank", "dtrain_standing_rank"} & {
        name for name, *_ in values(openmetrics(file.read_text()))
    }


@pytest.mark.parametrize("plant", ["link", "pipe"])
def test_scalars_follow_no_link_that_another_user_has_put_in_their_place(
    tmp_path: Path, plant: str
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    scalars = Scalars(tmp_path)
    scalars._path.symlink_to(mine) if plant == "link" else os.mkfifo(scalars._path)
    scalars.add(Progress("rank-0", 1e9, 4, 4, 0.25, 4000, {}), {"loss": 0.25})
    scalars.write()
    assert mine.read_text() == "mine"


def test_scalars_that_cannot_be_written_end_neither_the_run_nor_the_file(
    folder: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(export, "PERIOD", HANG)  # this test writes, and the end
    scalars = tmp_path / "scalars"
    with Exports("0", scalars=scalars) as exports:
        scalars.rmdir()
        scalars.touch()  # in the way
        play(exports, folder)
        assert exports._scalars is not None
        exports._scalars.write()
        assert "dtrain_loss" in get(exports.address, "/metrics")[1]
        scalars.unlink()
        exports.on_event(
            events.ProgressReported("n1", Progress("rank-0", 1e9 + 40, 4, 4, 0.25, 4000, {}))
        )
        exports._scalars.write()
        (file,) = (scalars / "run-1").iterdir()
        with file.open("ab") as stream:
            stream.write(b"what a full disk left")
        exports.on_event(
            events.ProgressReported("n1", Progress("rank-0", 1e9 + 50, 5, 5, 0.125, 5000, {}))
        )
    # The reader below may import TensorFlow, which writes to stderr.
    assert capfd.readouterr() == ("", "")
    found = EventAccumulator(str(scalars / "run-1")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(4, 0.25), (5, 0.125)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metrics-port", "http"], "--metrics-port http: not a port"),
        (["--metrics-port", "65536"], "not a port"),
        (["--metrics-port", "192.0.2.1:0"], "cannot listen"),
        (["--metrics-file", "nowhere/run.prom"], "cannot be written: "),
        (["--metrics-file", "c.yaml"], "'c.yaml' was not written by dtrain"),
        (["--tensorboard-dir", "c.yaml/scalars"], "cannot write: Not a directory"),
        (["--tensorboard-dir", "/proc"], "cannot write: "),
    ],
    ids=" ".join,
)
def test_what_cannot_be_exported_ends_the_launch_before_it_begins(
    options: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(
        "cluster: {hosts: [a], gpus: 1, transport: local}\n"
        "job: {framework: torch, script: train.py}\n"
    )
    (tmp_path / "train.py").touch()
    process = warm.dtrain(
        "launch",
        "c.yaml",
        *options,
        environment={"PATH": "/usr/bin:/bin", "DTRAIN_HOME": str(tmp_path / "home")},
        folder=tmp_path,
        stderr=subprocess.PIPE,
    )
    _, stderr = process.communicate(timeout=HANG)
    assert process.wait() == 2
    assert message in stderr
    assert "\nhint: " in stderr
    assert not (tmp_path / "home").exists()
