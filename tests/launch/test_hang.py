"""A silent job: the report names which worker waits where."""

from __future__ import annotations

import shutil
import sys
import venv
from pathlib import Path

import pytest

from support.launching import Scene

SILENCE = "10s"
"""More than a busy machine needs to start a process, or lets one wait."""

# The ranks fall silent only after all have started.
HANG = """
import os, threading, time
from pathlib import Path

def all_reduce():
    threading.Event().wait()

def load_batch():
    threading.Event().wait()

ready = Path(__file__).with_name("ready")
ready.mkdir(exist_ok=True)
(ready / os.environ["RANK"]).touch()
while len(os.listdir(ready)) < 4:
    print("up", flush=True)
    time.sleep(0.2)
if os.environ["RANK"] == "2" and os.environ["DTRAIN_ATTEMPT"] == "1":
    load_batch()
if os.environ["DTRAIN_ATTEMPT"] == "1":
    all_reduce()
"""


@pytest.mark.parametrize("told_by", ["py-spy", "python itself"])
def test_the_rank_that_the_others_wait_for_is_named(scene: Scene, told_by: str) -> None:
    environment = scene.folder / "environment"
    venv.create(environment, symlinks=True)
    if told_by == "py-spy":
        spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
        assert spy is not None
        (environment / "bin/py-spy").symlink_to(spy)
    file = scene.cluster_file(
        scene.script(HANG),
        watchdog={"silence": SILENCE},
        restart={"max": 3},
        python=str(environment / "bin/python"),
        env={"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": ""},
    )
    # The bare environment has no torch, and this script needs none.
    done = scene.run(file, "--no-check")
    assert done.code == 1, str(done)
    assert f"error: no output and no progress from any worker for {SILENCE[:-1]} s" in done.stderr
    script = scene.folder / "script.py"
    waiting = f"called by all_reduce ({script}:6)"
    assert f"ranks 0-1, 3 on node[0-1]: in wait, {waiting}" in done.stderr
    assert f"rank 2 on node1: in wait, called by load_batch ({script}:9)" in done.stderr
    assert ("Fatal Python error: Aborted" in done.stdout + done.stderr) == (told_by != "py-spy")
    assert scene.leftovers() == []


# torchrun prints nothing while it starts, which takes long on a busy machine.
BEAT = """
import os, subprocess
beat = 'until [ "$(ls READY | wc -l)" = 4 ]; do echo starting; sleep 0.2; done'
if "RANK" not in os.environ:
    subprocess.Popen(["sh", "-c", beat])
"""


@pytest.mark.torch
def test_the_ranks_of_torchrun_are_distinguished(scene: Scene) -> None:
    ready, site = scene.folder / "ready", scene.folder / "site"
    ready.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text(BEAT.replace("READY", str(ready)))
    file = scene.cluster_file(
        scene.script(HANG),
        watchdog={"silence": SILENCE},
        rendezvous={"backend": "static"},
        env={"PYTHONPATH": str(site)},
    )
    done = scene.run(file, "--no-check")
    assert done.code == 1, str(done)
    waiting = f"called by all_reduce ({scene.folder / 'script.py'}:6)"
    assert f"ranks 0-1, 3 on node[0-1]: in wait, {waiting}\n" in done.stderr
    assert "rank 2 on node1: in wait, called by load_batch" in done.stderr
    assert "torchrun0" not in done.stderr
    assert scene.leftovers() == []


# Real collectives, and what the flight recorder really holds of them; but the process group is
# gloo's, which does not listen to the pipe, so that a thread does for it what NCCL's does.
# A process prints until then: the import of torch can hold all threads of a rank for seconds.
COLLECTIVES = """
import os, subprocess, threading
beat = subprocess.Popen(["sh", "-c", "while sleep 0.2; do echo preparing; done"])
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo")
rank = dist.get_rank()
pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe"
os.mkfifo(pipe)

def listen():
    with open(pipe) as asked:
        asked.read(1)
    with open(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}", "wb") as file:
        file.write(_dump_fr_trace())

threading.Thread(target=listen, daemon=True).start()

def step(size):
    dist.all_reduce(torch.ones(size))

for number in range(12):
    step(3)
_dump_fr_trace()  # the first one reads the symbols of torch, for seconds of CPU time
beat.kill()
if rank == 1:
    threading.Event().wait()
step(7)
"""


@pytest.mark.torch
def test_the_collective_that_a_rank_has_not_joined_is_named(scene: Scene) -> None:
    script = scene.script(COLLECTIVES)
    file = scene.cluster_file(script, hosts=1, slots=2, watchdog={"silence": SILENCE})
    done = scene.run(file, "--no-check")
    assert done.code == 1, str(done)
    assert (
        "rank 1 has not joined collective 13 of the default process group (all_reduce of Float[7],"
        f" called by step ({script}:21)); rank 0 has\n"
    ) in done.stderr, str(done)
    assert scene.leftovers() == []


# What NCCL leaves when it times out by itself.
TIMES_OUT = """
import os, pickle, pathlib, sys, time
rank = int(os.environ["RANK"])
entry = {
    "process_group": ("0", "default_pg"), "p2p_seq_id": 0, "is_p2p": False,
    "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 3]], "input_dtypes": ["Float"],
    "retired": False, "frames": [],
}
entries = [entry | {"collective_seq_id": 13, "state": "completed"}]
if rank != 2:
    entries.append(entry | {"collective_seq_id": 14, "state": "started"})
config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
file = pathlib.Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}")
draft = file.with_name(f"draft-{rank}")
draft.write_bytes(pickle.dumps({"entries": entries, "pg_config": config}))
draft.rename(file)
pathlib.Path(sys.argv[1], str(rank)).touch()
while len(os.listdir(sys.argv[1])) < 4:
    time.sleep(0.02)
if rank == 0:
    raise SystemExit("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=14, ...)")
time.sleep(600)
"""


def test_a_timeout_of_nccl_is_explained_by_its_flight_recorders(scene: Scene) -> None:
    ready = scene.folder / "ready"
    ready.mkdir()
    file = scene.cluster_file(
        scene.script(TIMES_OUT), args=[str(ready)], watchdog={"silence": "10m"}
    )
    done = scene.run(file)
    assert done.code == 1, str(done)
    assert "error: rank 0 on node0 exited with status 1" in done.stderr
    assert "rank 2 has not joined collective 14 of the default process group" in done.stderr


def test_a_hang_may_cause_a_restart(scene: Scene) -> None:
    file = scene.cluster_file(
        scene.script(HANG), watchdog={"silence": SILENCE, "then": "restart"}, restart={"max": 1}
    )
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert "called by load_batch" in done.stderr
    assert "attempt 2 starts" in done.stderr
    assert scene.leftovers() == []


# Longer in total than the allowed silence, but never as long between two words.
TALK = """
import time
for number in range(50):
    print("beat", number, flush=True)
    time.sleep(0.2)
"""


def test_silence_is_counted_from_the_last_word(scene: Scene) -> None:
    # Few processes: on a busy machine, they begin to talk late.
    file = scene.cluster_file(scene.script(TALK), hosts=1, slots=1, watchdog={"silence": "8s"})
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert "no output" not in done.stderr


def test_a_report_ends_nothing(scene: Scene) -> None:
    go = scene.folder / "go"
    script = scene.script(
        "import pathlib, sys, time\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
        "print('done', flush=True)\n"
    )
    file = scene.cluster_file(script, args=[str(go)], watchdog={"silence": "1s", "then": "report"})
    launch = scene.launch(file)
    launch.until("collecting stacks", count=2)  # after one report, it waits for the next hang
    go.touch()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert done.stdout.count("done") == 4
