"""What the dashboard shows, at any size and with any number of hosts."""

import random

import pytest
from rich.text import Text

from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.launchplan.build import build
from dtrain.messages.telemetry import Sample
from dtrain.runs import events
from dtrain.runs.progress import Progress
from dtrain.spec.load import parse
from dtrain_cli.views.board import Board, HostRow, state, summary
from dtrain_cli.views.dashboard import draw

SIZES = [(80, 24), (120, 40), (250, 70), (40, 10), (20, 3), (1, 1)]
HOSTS = {f"gpu{number:02}": "running" for number in range(1, 9)}


def gpu(index, *, use=97, memory=70_000, heat=66, clock=1980, slowed=4, ecc=0, xids=0):
    known = [index, use, memory, 81_559, 610.0, 700, heat, clock, 1980, slowed, ecc, xids]
    return [*known, *[None] * 5]


def sample(*gpus, **fields):
    body = {
        "time": 1.0,
        "cpus": 96,
        "cpu": 32.0,
        "memory": [400 << 30, 1000 << 30],
        "disk": None,
        "network": [3e6, 4e6],
        "infiniband": [2.1e10, 2.2e10],
        "gpus": list(gpus),
        "ranks": [],
    }
    return Sample.read(body | fields)


def board(hosts=8, gpus=8, **odd):
    """A healthy run; ``odd`` has the GPUs of hosts that are not."""
    names = [f"gpu{number:02}" for number in range(1, hosts + 1)]
    one = Board("gpt", 0.0, hosts * gpus)
    one.hosts = {name: HostRow(name, (), "running") for name in names}
    for name in names:
        rows = [gpu(index) for index in range(gpus)]
        for odd_one in odd.get(name, ()):
            rows[odd_one[0]] = odd_one
        one.on_event(events.Sampled(name, sample(*rows)), 100.0)
    return one


def shown(one, columns=80, rows=24, now=101.0, output=()):
    return [line.plain.rstrip() for line in draw(one, list(output), columns, rows, now)]


def line_of(lines, host):
    return next(line for line in lines if line.startswith(f" {host} "))


@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("hosts", [0, 1, 8, 128])
@pytest.mark.parametrize("gpus", [0, 1, 8, 16])
def test_it_fits_any_screen(columns, rows, hosts, gpus):
    one = board(hosts, gpus)
    one.hosts["日本語 \x1b[2J[bold]" * 9] = HostRow("日本語 \x1b[2J[bold]" * 9, (), "failed")
    one.on_event(
        events.ProgressReported("", Progress("rank-0", 1.0, 5, 10, 2.5, 100, {"x" * 64: 1.0})), 0.0
    )
    output = [Text(f"line {number} " + "日本" * 200) for number in range(100)]
    lines = draw(one, output, columns, rows, 101.0)
    assert len(lines) == rows
    assert all(line.cell_len <= columns for line in lines)
    assert "\x1b" not in "".join(line.plain for line in lines)


def test_a_small_screen_has_all_that_matters():
    one = board(
        8,
        gpu02=[gpu(5, heat=88, clock=1200, slowed=0x40)],
        gpu04=[gpu(0, use=0)],
        gpu07=[gpu(3, xids=2)],
        gpu08=[gpu(1, memory=81_100)],
    )
    for step in (100, 160):
        one.on_event(
            events.ProgressReported("", Progress("rank-0", step / 2, step, 1000, 2.4131, None, {})),
            0.0,
        )
    lines = shown(one, output=[Text(f"line {number}") for number in range(50)])
    assert lines[0].startswith(" gpt  1 min 41 s · 8 hosts running · 64 workers")
    assert lines[1].startswith(" step 160 of 1,000 · loss 2.413 · 2.0 steps/s · 7 min 0 s left  ━")
    assert lines[2].startswith(" 64 GPUs: 95% busy (0 to 97), memory 86%, 39.0 kW")
    assert line_of(lines, "gpu01") == (" gpu01    33%  40%      21G 22G" + "   97▇" * 8)
    assert line_of(lines, "gpu02").count("97▇T") == 1
    assert line_of(lines, "gpu08").count("97█M") == 1
    # The worst first.
    assert lines[12:15] == [
        " gpu07 GPU 3: GPU errors (2 Xid errors since the start)",
        " gpu02 GPU 5: clock throttled by heat (88 °C, 1,200 of 1,980 MHz)",
        " gpu08 GPU 1: memory full (79.2 of 79.6 GiB) and 1 more",
    ]
    assert lines[-1] == "line 49"
    assert lines[15].startswith("── output ──")


def test_a_long_name_leaves_the_state_its_own_line():
    one = board(8)
    one.run = "pretraining-with-all-documents-20261127-021025-a7d281"
    lines = shown(one, 60)
    assert lines[0] == f" {one.run}"
    assert lines[1].startswith(" 1 min 41 s · 8 hosts running · 64 workers")


def test_a_large_screen_has_numbers():
    lines = shown(board(2), 250, 70)
    assert line_of(lines, "gpu01").count("97%   68/80G  66°  610W") == 8
    assert "21G 22G" in line_of(lines, "gpu01")


def test_the_use_of_ranks_the_disk_and_the_past():
    one = board(2, 1)
    ranks = [["rank-0", 1.25, 3 << 30, 40], ["rank-1", 0.5, 38 << 30, 210]]
    for second in range(0, 60, 5):
        use = gpu(0, use=100 if second >= 30 else 10)
        body = sample(use, ranks=ranks, storage=[97 << 40, 100 << 40])
        one.on_event(events.Sampled("gpu01", body), 200.0 + second)
        one.on_event(events.Sampled("gpu02", sample(use)), 200.0 + second)
    lines = shown(one, 160, 40, now=256.0)
    assert lines[1].endswith("  busy █▄▁▁▄██")
    assert "  FULL   RANK: CPU RAM FILES  GPUS: BUSY, MEMORY, HEAT, POWER, CLOCK" in lines[2]
    cell = "100%   68/80G  66°  610W of 700 1980MHz"
    assert line_of(lines, "gpu01").endswith(cell)
    assert "  97%         1.2 40.8G 210  " in line_of(lines, "gpu01")
    assert "busy █" not in "".join(shown(one, 60, 24, now=256.0))


def test_a_silent_host_shows_since_when_on_a_narrow_screen():
    one = board(2, 0)
    body = sample(ranks=[["rank-0", 1.25, 3 << 30, 40]], disk=[1e6, 2e6], network=[1e6, 2e6])
    for host in one.hosts:
        one.on_event(events.Sampled(host, body), 50.0 if host == "gpu02" else 99.0)
    lines = shown(one, 80, 24, now=100.0)
    assert len(line_of(lines, "gpu01")) > 70
    assert line_of(lines, "gpu02").endswith("…  no data for 50 s")


def test_alike_hosts_fold_and_odd_ones_stand_out():
    one = board(64, gpu07=[gpu(2, slowed=0x40)])
    one.hosts["gpu09"].sampled = 60.0
    one.hosts["gpu11"].state = "unreachable"
    lines = shown(one)
    assert line_of(lines, "61 alike").count("97▇") == 8
    assert "97▇T" in line_of(lines, "gpu07")
    assert line_of(lines, "gpu09").endswith("no data for 41 s")
    assert "unreachable" in line_of(lines, "gpu11")
    rows = [line for line in lines if line.startswith((" gpu", " 61"))]
    assert rows[1].startswith(" gpu11")
    # No trouble is named while a host is gone: the job waits for it.
    one.hosts["gpu11"].state = "running"
    assert " gpu07 GPU 2: clock throttled by heat (66 °C, 1,980 of 1,980 MHz)" in shown(one)


def test_a_gpu_may_not_know_its_highest_clock():
    values = gpu(2, slowed=0x40)
    values[8] = None
    lines = shown(board(1, gpu01=[values]))
    assert " gpu01 GPU 2: clock throttled by heat (66 °C)" in lines


def test_hosts_of_slow_and_of_hanging_ranks_stand_apart():
    one = board(64, gpu07=[gpu(2, slowed=0x40)], gpu08=[gpu(1, ecc=3)])
    one.on_event(
        events.StragglersChanged(Straggler(("rank-24",), ("gpu04",), False, 0.12, "data", 100)),
        99.0,
    )
    one.on_event(events.StallChanged(Stall(("rank-40",), ("gpu06",), 20.0, 100, 511)), 99.0)
    lines = shown(one)
    rows = [line.split()[0] for line in lines[3:8]]
    assert rows == ["60", "gpu04", "gpu06", "gpu07", "gpu08"]
    assert "97▇E" in line_of(lines, "gpu08")
    (row,) = [one for one in draw(one, [], 80, 24, 101.0) if one.plain.startswith(" gpu06 ")]
    on_red = [row.plain[part.start : part.end] for part in row.spans if "on red" in part.style]
    assert [*map(str.strip, on_red)] == ["gpu06"]  # green on red would be hard to read
    assert lines[8:11] == [
        " rank 40 on gpu06 stands still after step 100, for 22 s; 511 wait for it",
        " rank 24 on gpu04 is 12 % slower than the others: waits for data",
        " gpu08 GPU 1: uncorrected memory errors (3 since the boot) and 1 more",
    ]


def test_alike_hosts_show_their_mean_rates():
    one = board(64)
    for number, host in enumerate(one.hosts):
        one.on_event(
            events.Sampled(host, sample(gpu(0), infiniband=[1e9 * (number % 2), 2e10])), 100.0
        )
    assert "  500M 20G" in line_of(shown(one), "64 alike")


def test_what_most_hosts_have_folds_too():
    full = {f"gpu{number:02}": [gpu(0, memory=81_000)] for number in range(1, 65)}
    lines = shown(board(64, **full))
    assert any(line.startswith(" 64 alike") for line in lines)
    assert " 64 GPUs on gpu[01-64]: memory full" in lines


@pytest.mark.parametrize("rows", range(8, 30))
def test_too_many_odd_hosts_are_counted(rows):
    odd = {f"gpu{number:02}": [gpu(0, slowed=0x40)] for number in range(1, 31)}
    lines = shown(board(64, **odd), rows=rows, output=[Text("of a worker")] * 9)
    assert lines[-3:] == ["of a worker"] * 3
    if any(line.startswith(" HOST") for line in lines):
        assert any(line.startswith(" 34 alike") for line in lines)
        more = next(line for line in lines if line.endswith(" more hosts"))
        single = [line for line in lines if line.startswith(" gpu") and " GPU " not in line]
        assert int(more.split()[1]) == 30 - len(single)


def test_only_the_gpus_of_the_job_count():
    one = board(1, gpu01=[gpu(0, use=0)])
    one.hosts["gpu01"].job_gpus = (4, 5, 6, 7)
    lines = shown(one)
    assert line_of(lines, "gpu01").count("97%") == 4
    assert not any("idle" in line for line in lines)


def test_idle_gpus_are_no_trouble_while_all_are_idle():
    assert board(1, gpu01=[gpu(index, use=0) for index in range(8)]).troubles() == {}


def test_a_screen_of_128_hosts_is_drawn_in_time():
    generator = random.Random(1)
    one = board(128)
    for name in one.hosts:
        rows = [gpu(index, use=generator.randint(90, 100)) for index in range(8)]
        one.on_event(events.Sampled(name, sample(*rows)), 100.0)
    assert line_of(shown(one), "128 alike").count("▇") == 8


def test_hosts_without_names_are_not_listed():
    """A queued job: the engine has not chosen them yet."""
    text = "cluster: {slurm: {}, nodes: 2, gpus: 8}\njob: {framework: none, script: t.py}\n"
    plan, one = build(parse(text, "c.yaml")), Board()
    one.on_event(events.RunLaunched("gpt-1", plan, "/runs/gpt-1"), 100.0)
    for host in plan.host_names:
        one.on_event(events.HostState(host, "queued", "waiting for free machines"), 100.0)
    lines = shown(one)
    assert lines[0].endswith("2 hosts queued · 16 workers")
    assert lines[1].strip() == "waiting for free machines"
    assert "output" in lines[2]
    one.on_event(events.HostsPlanned(plan.on(["gpu03", "gpu07"])), 101.0)
    one.on_event(events.Sampled("gpu07", sample()), 101.0)
    assert line_of(shown(one), "gpu07")


def test_summaries():
    assert summary({"a": ""}, 1) == "1 host waiting · 1 worker"
    mixed = HOSTS | {"gpu03": "failed", "gpu04": "connecting"}
    assert summary(mixed, 64) == "8 hosts: 1 connecting, 6 running, gpu03 failed · 64 workers"
    assert summary(dict.fromkeys(HOSTS, "unreachable"), 64) == (
        "8 hosts: 8 unreachable · 64 workers"
    )


def test_states():
    assert state(HOSTS.values()) == "running"
    assert state((HOSTS | {"gpu01": "preparing"}).values()) == "starting"
    assert state((HOSTS | {"gpu01": "failed"}).values()) == "stopping"
    assert state((HOSTS | {"gpu01": "ended"}).values()) == "ending"
    assert state((HOSTS | {"gpu01": "unreachable"}).values()) == "running"
    assert state([]) == "starting"
