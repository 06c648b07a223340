"""Averages, the bound of what a host keeps, and what GPU tools print."""

import itertools
import json
import os
import resource
import shutil
import tracemalloc
from functools import partial

import pytest

from dtrain.messages.decode import ProtocolError
from dtrain.messages.telemetry import Sample
from dtrain.node.agent.processes import Proc, environment_of
from dtrain.node.agent.wire import encode
from dtrain.node.facts.machine import leftovers
from dtrain.node.telemetry import amd, files, host, nvidia, ranks, sampler
from dtrain.node.telemetry.amd import VIOLATIONS, rows_of
from dtrain.node.telemetry.averages import average
from dtrain.node.telemetry.files import STORED, Files
from dtrain.node.telemetry.follow import TelemetryFiles
from dtrain.node.telemetry.host import Devices
from dtrain.node.telemetry.nvidia import GpuProcesses
from dtrain.node.telemetry.tool import Tool
from dtrain.node.telemetry.tool import number as number_in
from dtrain.runs import telemetry
from support.limits import until
from support.machines import MACHINES
from support.runs import averages


def sample(time, *, use=90, slowed=0, memory=1000, gpus=1):
    row = [use, memory, 2000, 300.5, 400, 60, 1500, 1980, slowed, 0, 0, *[None] * 5]
    return {
        "time": time,
        "cpus": 8,
        "cpu": 2.5,
        "memory": [10, 100],
        "disk": None,
        "network": [1000, 2000],
        "infiniband": None,
        "storage": [5, 50],
        "losses": 0.0,
        "round_trip": 0.25,
        "gpus": [[index, *row] for index in range(gpus)],
        "ranks": [["rank-0", 1.5, 4096, 12]],
    }


def test_an_average_keeps_what_a_mean_would_hide():
    window = [sample(0.0), sample(1.0, use=50, slowed=0x40, memory=1900), sample(2.0, slowed=4)]
    found = Sample.read(average(window))
    (gpu,) = found.gpus
    assert gpu.use == pytest.approx(76.7)
    assert (gpu.memory_used, gpu.slowed) == (1900, 0x44)
    assert (found.time, found.network) == (0.0, (1000, 2000))


def test_a_host_keeps_the_latest_averages_and_a_relay_misses_none(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_STORED", 4000)
    folder = os.open(tmp_path, os.O_RDONLY)
    written, relay = Files(folder), TelemetryFiles(os.fsencode(tmp_path), 0)
    got = []
    for number in range(1, 101):
        written.store(sample(10.0 * number))
        got += [body["time"] for _, body in relay.read(over=True)]
    assert got == [10.0 * number for number in range(1, 101)]
    assert (tmp_path / "telemetry").stat().st_size <= 4000
    late = TelemetryFiles(os.fsencode(tmp_path), 960.0)
    assert [body["time"] for _, body in late.read(over=True)] == [970.0, 980.0, 990.0, 1000.0]
    os.close(folder)


def test_a_clock_that_is_set_back_loses_no_averages(tmp_path, monkeypatch):
    """Neither while a launcher is connected, nor for one that connects later."""
    monkeypatch.setattr(files, "MAX_STORED", 4000)
    folder = os.open(tmp_path, os.O_RDONLY)
    written, relay = Files(folder), TelemetryFiles(os.fsencode(tmp_path), 0)
    times = [1000.5 + 10 * number for number in range(5)]
    times += [400.5 + 10 * number for number in range(60)]
    got = []
    for time in times:
        written.store(sample(time))
        got += [body["time"] for _, body in relay.read(over=True)]
    assert got == times
    late = TelemetryFiles(os.fsencode(tmp_path), telemetry.round_up(Sample.read(sample(times[-3]))))
    assert [body["time"] for _, body in late.read(over=True)] == times[-2:]
    # The last average that this launcher has is not among those that the host has kept.
    other = TelemetryFiles(os.fsencode(tmp_path), 2001)
    kept = [body["time"] for _, body in other.read(over=True)]
    assert kept == times[-len(kept) :]
    assert len(kept) > 3
    os.close(folder)
    writer = telemetry.TelemetryWriter(tmp_path / "run", "gpu01")
    (tmp_path / "run").mkdir(mode=0o700)
    for time in times:
        assert writer.append(Sample.read(sample(time)))
    assert [one.time for one in averages(tmp_path / "run", "gpu01")] == times


def test_a_host_with_eight_gpus_keeps_a_day():
    gpu = [97.3, 70144.0, 81559, 612.3, 700.0, 64, 1965.2, 1980, 4, 0, 0, 61.2, 2619.0, 0, 0, 0, 0]
    body = sample(1795435156.279) | {
        "memory": [629030912000, 2527606374400],
        "storage": [198750064640, 270553174016],
        "disk": [902702.0, 646470.0],
        "network": [902702.0, 646470.0],
        "infiniband": [90270200000.0, 64647000000.0],
        "gpus": [[index, *gpu[:-1]] for index in range(8)],
        "ranks": [[f"rank-{rank}", 3.01, 14528512000, 353] for rank in range(100, 108)],
    }
    # The older half is dropped when it is full.
    assert 8640 * len(encode(body) + b"\n") <= files.MAX_STORED / 2


def test_a_long_history_is_sent_in_pieces(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    written = Files(folder)
    for number in range(60):
        written.store(sample(10.0 * number))
    os.close(folder)
    relay = TelemetryFiles(os.fsencode(tmp_path), -1.0)
    assert len(list(relay.read(over=False))) == 25
    assert len(list(relay.read(over=True))) == 35


def test_an_infiniband_port_without_counters_harms_nothing(tmp_path, monkeypatch):
    for port, counters in (("1", ["10\n", "20\n"]), ("2", ["N/A (no PMA)\n"] * 2)):
        (tmp_path / port).mkdir()
        for name, text in zip(("port_rcv_data", "port_xmit_data"), counters, strict=True):
            (tmp_path / port / name).write_text(text)
    ports = [str(tmp_path / port) for port in "12"]
    monkeypatch.setattr(host, "PORTS", Devices(lambda: ports))
    assert host.infiniband_bytes() == [40, 80]
    monkeypatch.setattr(host, "PORTS", Devices(lambda: ports[1:]))
    assert host.infiniband_bytes() is None


RANKS = [{"role": "worker", "index": at, "rank": at} for at in range(3)]


def test_a_rank_with_many_processes_hides_no_other_rank(monkeypatch):
    monkeypatch.setattr(ranks, "MAX_PROCESSES", 4)
    first, *children, second = (
        Proc(pid, b"%d (python) S %d %d" % (pid, parent, pid) + b" 0" * 20)
        for pid, parent in ((901, 1), (902, 901), (903, 901), (904, 901), (905, 1))
    )
    monkeypatch.setattr(ranks, "processes", lambda: {one.pid: one for one in (first, *children)})
    running = [(RANKS[0], first), (RANKS[1], second)]
    counters = ranks.RankCounters(lambda: running)
    counters._search()
    assert (len(counters._trees["rank-0"]), counters._trees["rank-1"]) == (2, [905])


def test_a_search_for_sockets_looks_at_a_limited_number_of_files(monkeypatch):
    monkeypatch.setattr(ranks, "MAX_FILES", 100)
    procs = [Proc(pid, b"%d (python) S 1 %d" % (pid, pid) + b" 0" * 20) for pid in (901, 902, 903)]
    looked = []
    monkeypatch.setattr(ranks, "processes", lambda: {one.pid: one for one in procs})
    monkeypatch.setattr(ranks, "listed", lambda path: ["0"] * (10 if "901" in path else 500))
    monkeypatch.setattr(ranks, "inodes_of", lambda pid, names: looked.append(len(names)) or ())
    counters = ranks.RankCounters(lambda: [*zip(RANKS, procs, strict=True)])
    counters._search()
    assert looked == [10, 45, 45]
    assert [*counters._files.values()] == [10, 500, 500]


def test_the_memory_of_amd_cards():
    recorded = (MACHINES / "amd-mi300x" / "rocm-smi.json").read_bytes()
    rows = rows_of(b"WARNING: something\n" + recorded)
    assert [row[0] for row in rows] == list(range(len(rows)))
    assert all(0 <= row[2] < row[3] == 196592 for row in rows)
    assert rows_of(b"no JSON") == rows_of(b"[1]") == []


def test_the_load_of_amd_cards():
    card = {
        "GPU use (%)": "97",
        "Average Graphics Package Power (W)": "612.0",
        "Max Graphics Package Power (W)": "750.0",
        "Temperature (Sensor junction) (C)": "71.0",
        "Temperature (Sensor memory) (C)": "52.0",
        "sclk clock speed:": "(1980Mhz)",
    }
    (row,) = rows_of(json.dumps({"card0": card, "system": {}}).encode())
    (gpu,) = Sample.read({**sample(0.0), "gpus": [row]}).gpus
    assert (gpu.use, gpu.power, gpu.power_limit) == (97, 612, 750)
    assert (gpu.temperature, gpu.clock) == (71, 1980)


def test_amd_smi():
    def of(value, unit):
        return {"value": value, "unit": unit}

    card = {
        "gpu": 0,
        "usage": {"gfx_activity": of(97, "%"), "umc_activity": of(41, "%"), "mm_activity": "N/A"},
        "power": {"socket_power": of(612, "W"), "throttle_status": "UNTHROTTLED"},
        "clock": {
            "gfx_0": {"clk": of(1980, "MHz"), "max_clk": of(2100, "MHz")},
            "mem_0": {"clk": of(900, "MHz"), "max_clk": of(1300, "MHz")},
        },
        "temperature": {"edge": "N/A", "hotspot": of(71, "C"), "mem": of(52, "C")},
        "ecc": {"total_correctable_count": 7, "total_uncorrectable_count": 1},
        "mem_usage": {"total_vram": of(196592, "MB"), "used_vram": of(70000, "MB")},
    }
    for printed in ([card], {"gpu_data": [card]}):
        (row,) = rows_of(json.dumps(printed).encode())
        (gpu,) = Sample.read({**sample(0.0), "gpus": [row]}).gpus
        assert (gpu.use, gpu.memory_used, gpu.memory_total, gpu.power) == (97, 70000, 196592, 612)
        assert (gpu.temperature, gpu.clock, gpu.clock_max, gpu.memory_clock) == (
            71,
            1980,
            2100,
            900,
        )
        assert (gpu.memory_use, gpu.ecc, gpu.ecc_corrected) == (41, 1, 7)
    assert rows_of(b"[{}]") == rows_of(b'[{"gpu": 0, "usage": 3}, {"gpu": []}]') == []
    (bare,) = rows_of(b'[{"gpu": 3, "usage": "N/A"}]')
    assert Sample.read({**sample(0.0), "gpus": [bare]}).gpus[0].use is None


def test_the_shape_of_amd_smi_from_rocm_7():
    """Keys and absent values as a Radeon prints them. The second GPU is an Instinct."""
    off = {f"{name}_violation_status": "N/A" for name in VIOLATIONS}
    radeon = {
        "gpu": 0,
        "usage": {"gfx_activity": {"value": 91, "unit": "%"}, "gfx_busy_inst": "N/A"},
        "power": {"socket_power": {"value": 214, "unit": "W"}, "throttle_status": "THROTTLED"},
        "clock": {"gfx_0": {"clk": {"value": 2774, "unit": "MHz"}, "max_clk": {"value": 0}}},
        "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": "N/A"},
        "mem_usage": "N/A",
        "throttle": {"accumulation_counter": "N/A", **off},
    }
    calm = dict.fromkeys(off, "NOT ACTIVE")
    hot = {**calm, "hbm_thermal_violation_status": "ACTIVE", "ppt_violation_status": "ACTIVE"}
    both = [radeon, {"gpu": 1, "throttle": hot}, {"gpu": 2, "throttle": calm}]
    printed = b"WARNING: [render] is missing\n" + json.dumps({"gpu_data": both}, indent=4).encode()
    found = Sample.read({**sample(0.0), "gpus": rows_of(printed)}).gpus
    # A power limit is normal, so THROTTLED alone says nothing.
    assert [gpu.slowed for gpu in found] == [None, 0x44, 0]
    assert (found[0].clock, found[0].clock_max, found[0].ecc) == (2774, None, None)
    assert found[0].memory_total is None


@pytest.mark.parametrize("known", [("amd-smi", "--throttle"), ("amd-smi", ""), ("rocm-smi", "")])
def test_amd_tools_that_know_less(known, tmp_path, monkeypatch):
    name, option = known
    answer = '[{"gpu": 5}]' if name == "amd-smi" else '{"card5": {}}'
    for tool in ("amd-smi", "rocm-smi"):
        refused = {"--throttle": "nothing", "": "*--throttle*"}[option] if tool == name else "*"
        text = f"#!/bin/sh\ncase \"$*\" in {refused}) echo usage; exit 2;; esac\necho '{answer}'\n"
        (tmp_path / tool).write_text(text)
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sampler, "find_program", partial(shutil.which, path=str(tmp_path)))
    started = []
    monkeypatch.setattr(amd, "Tool", lambda argv: started.append(Tool(argv)) or started[-1])
    tool = sampler.gpu_tool(lambda pid: None)
    try:
        until(lambda: tool.read({}), "a row")
        assert [row[0] for row in tool.read({})] == [5]
    finally:
        tool.stop()
        for one in started:
            os.waitpid(one._process.pid, 0)


def test_processes_that_have_left_a_gpu_make_room_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "MAX_PROCESSES", 3)
    monkeypatch.setattr(nvidia, "is_foreign", lambda pid, own: True)
    program, go = tmp_path / "nvidia-smi", tmp_path / "go"
    lists = "for pid in {}; do echo 00000000:17:00.0, $pid, 512; done"
    wait = f"until test -e {go}; do sleep 0.02; done"
    lines = ["#!/bin/sh", lists.format("1 2 3 4"), wait, lists.format("5"), "exec sleep 600"]
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    processes = GpuProcesses(str(program), lambda pid: None)
    try:
        until(
            lambda: processes.others(100.0) == {"0000:17:00": [3, 3 * 512]}, "the first processes"
        )
        go.touch()
        until(lambda: processes.others(200.0) == {"0000:17:00": [1, 512]}, "the later one")
    finally:
        processes.stop()
        os.waitpid(processes._query._tool._process.pid, 0)


def test_a_tool_is_not_a_process_of_the_run_that_it_watches(monkeypatch):
    for name in ("DTRAIN_RUN_ID", "DTRAIN_HOST", "DTRAIN_RUN_DIR"):
        monkeypatch.setenv(name, "watched")
    tool = Tool(["sleep", "600"])
    pid = tool._process.pid
    try:
        until(lambda: environment_of(pid).get(b"LC_ALL") == b"C", "the program")
        assert pid not in {pid for pids in leftovers({}).values() for pid in pids}
    finally:
        tool.stop()
        os.waitpid(pid, 0)


def test_lost_packets_are_counted(tmp_path, monkeypatch):
    (before,) = host.lost_packets()
    for name, text in (("symbol_error", "10000000\n"), ("port_rcv_errors", "N/A (no PMA)\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "PORTS", Devices(lambda: [str(tmp_path)]))
    assert before + 10_000_000 <= host.lost_packets()[0] < before + 10_100_000


@pytest.mark.parametrize(
    "change",
    [
        {"time": float("inf")},
        {"gpus": [[0]]},
        {"gpus": [[0, "90", *[None] * 15]]},
        {"gpus": [[0, *[None] * 16]] * 65},
        {"ranks": [["x" * 65, None, 0, 0]]},
        {"memory": [1, -1]},
        {"cpu": 10**400},
    ],
    ids=str,
)
def test_the_launcher_takes_nothing_else(change):
    with pytest.raises(ProtocolError):
        Sample.read({**sample(0.0), **change})


def test_a_network_file_system_may_be_of_any_size(monkeypatch):
    # Amazon EFS has 8 EiB. Beyond a quota, more is free for others than the disk has for this user.
    disk = os.statvfs_result((1 << 20, 1 << 20, 1 << 43, 0, (1 << 43) - 5, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    found = {**sample(10.0), "storage": host.storage(b"/")}
    assert Sample.read(found).storage == (5 << 20, 1 << 63)
    disk = os.statvfs_result((1 << 20, 1 << 20, 100, 0, 200, 0, 0, 0, 0, 255))
    assert host.storage(b"/") == [0, 100 << 20]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("98", 98),
        ("612.33 W", 612.33),
        ("[N/A]", None),
        ("-1", None),
        ("4294967295", (1 << 32) - 1),
        ("18446744073709551615", None),
    ],
)
def test_a_number_that_a_gpu_does_not_have_costs_no_sample(text, value):
    body = sample(10.0)
    body["gpus"][0][1:9] = [number_in(text)] * 8
    read = Sample.read(body).gpus[0]
    assert (read.use, read.temperature, read.clock_max) == (value, value, value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0x40", 0x40), ("0x" + 16 * "F", (1 << 64) - 1), ("0x" + 17 * "F", None), ("7", 7)],
)
def test_a_count_that_a_gpu_does_not_have_costs_no_sample(text, value):
    body = sample(10.0)
    body["gpus"][0][9:11] = [number_in(text)] * 2
    assert Sample.read(body).gpus[0].slowed == value


def test_a_gpu_and_a_rank_count_once():
    body = sample(10.0, gpus=2)
    body["gpus"].append(body["gpus"][0])
    body["ranks"] *= 2
    read = Sample.read(body)
    assert [gpu.index for gpu in read.gpus] == [0, 1]
    assert [rank.process for rank in read.ranks] == ["rank-0"]


def test_a_run_folder_thins_older_averages_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "DAILY", 60_000)
    writer = telemetry.TelemetryWriter(tmp_path, "gpu01", hosts=2)
    file = tmp_path / "telemetry" / "gpu01.jsonl"
    begin, every, days = 1e9 + 0.25, 300, 3
    for number in range(days * 86400 // every):
        stored = Sample.read(sample(begin + number * every))
        assert writer.append(stored)
        days_so_far = max(1.0, number * every / 86400)
        assert file.stat().st_size <= 30_000 * days_so_far + 400
    times = [one.time for one in averages(tmp_path, "gpu01")]
    newest = times[-50:]
    assert times[0] == begin
    assert newest == [stored.time - every * back for back in range(49, -1, -1)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) < 7200
    read = [one.time for one in telemetry.sampled(tmp_path, "gpu01", 12)]
    assert 11 <= len(read) <= 12
    spacing = [after - before for before, after in itertools.pairwise(read)]
    assert max(spacing) < 3 * days * 86400 / 12


@pytest.mark.parametrize("most", [1, 2, 12])
@pytest.mark.parametrize("back", [0, 505, 5005])
def test_a_clock_that_is_set_back_does_not_change_how_many_averages_are_read(tmp_path, most, back):
    writer = telemetry.TelemetryWriter(tmp_path, "gpu01")
    times = [1e9 + 10 * number - back * (number >= 100) for number in range(200)]
    assert all(writer.append(Sample.read(sample(time))) for time in times)
    read = [times.index(one.time) for one in telemetry.sampled(tmp_path, "gpu01", most)]
    assert read[0] == 0
    assert len(read) == most
    gaps = [after - before for before, after in itertools.pairwise(read)]
    assert max(gaps, default=0) < 2 * 200 / max(1, most - 1)


@pytest.mark.parametrize("back", [0, 40_000, 4_000_000])
def test_a_clock_that_is_set_back_does_not_change_what_is_thinned(tmp_path, monkeypatch, back):
    monkeypatch.setattr(telemetry, "DAILY", 20_000)
    writer = telemetry.TelemetryWriter(tmp_path, "gpu01")
    times = [1e9 + 600 * number - back * (number >= 300) for number in range(600)]
    assert all(writer.append(Sample.read(sample(time))) for time in times)
    kept = [times.index(one.time) for one in averages(tmp_path, "gpu01")]
    assert kept[0] == 0
    assert 200 < len(kept) < 220
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert max(gaps) < 15


def test_a_launcher_that_attaches_to_a_long_run_does_not_hold_its_averages(tmp_path):
    written = telemetry.TelemetryWriter(tmp_path, "gpu01")
    assert written.append(Sample.read(sample(1e9)))
    file = tmp_path / "telemetry" / "gpu01.jsonl"
    file.write_bytes(file.read_bytes() * 10_000)
    attached = telemetry.TelemetryWriter(tmp_path, "gpu01")
    newest = Sample.read(sample(1e9 + 86400))
    tracemalloc.start()
    try:
        assert attached.append(newest)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < file.stat().st_size / 10


@pytest.mark.parametrize(("most", "lines"), [(64, 469), (120, 141), (163, 208), (256, 301)])
def test_rounding_does_not_add_averages(tmp_path, most, lines):
    writer = telemetry.TelemetryWriter(tmp_path, "gpu01")
    assert all(writer.append(Sample.read(sample(1e9 + 10 * each))) for each in range(lines))
    read = [one.time for one in telemetry.sampled(tmp_path, "gpu01", most)]
    assert 0.9 * most < len(read) <= most
    assert (read[0], read[-1]) == (1e9, 1e9 + 10 * (lines - 1))


def test_a_full_disk_loses_averages_only_until_it_has_space(tmp_path, monkeypatch):
    """The limit of a file's size cuts a write short, as a full disk does."""
    monkeypatch.setattr(files, "MAX_STORED", 1 << 21)
    folder = os.open(tmp_path, os.O_RDONLY)
    written, writer = Files(folder), telemetry.TelemetryWriter(tmp_path / "run", "gpu01")
    (tmp_path / "run").mkdir(mode=0o700)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        time, lost = 0.0, 0
        while lost < 3:
            time += 10.0
            size = os.stat(STORED, dir_fd=folder).st_size
            written.store(sample(time))
            unchanged = os.stat(STORED, dir_fd=folder).st_size == size
            lost += unchanged and not writer.append(Sample.read(sample(time)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    written.store(sample(time + 10.0))
    assert writer.append(Sample.read(sample(time + 10.0)))
    read = [json.loads(line)["time"] for line in (tmp_path / "telemetry").open()]
    assert read[-1] == time + 10.0
    assert read[-2] < time
    kept = [one.time for one in averages(tmp_path / "run", "gpu01")]
    assert kept[-1] == time + 10.0
    assert kept[-2] < time
    os.close(folder)


def test_a_run_folder_gives_back_what_was_stored(tmp_path):
    writer = telemetry.TelemetryWriter(tmp_path, "gpu01")
    read = [Sample.read(sample(float(time), gpus=2)) for time in (10, 20, 30)]
    assert all(map(writer.append, read))
    writer.show(read[2])
    writer.show(Sample.read(sample(31.0, gpus=0)))  # shorter than before
    with (tmp_path / "telemetry" / "gpu01.jsonl").open("a") as file:
        file.write('{"time": 40, "gp')  # a launcher was killed
    read.append(Sample.read(sample(50.0)))
    assert telemetry.TelemetryWriter(tmp_path, "gpu01").append(read[-1])
    assert list(averages(tmp_path, "gpu01")) == read
    assert telemetry.latest(tmp_path, "gpu01") == Sample.read(sample(31.0, gpus=0))
    assert telemetry.last_time(tmp_path, "gpu01") == 51
    assert telemetry.last_time(tmp_path, "gpu02") == 0
    for name in ("..", "a/b", ""):
        with pytest.raises(ValueError, match="not a host name"):
            telemetry.TelemetryWriter(tmp_path, name)
