"""A job that is reported to hang more than once."""

from __future__ import annotations

from support.launching import Scene

# Every rank's flight recorder answers, but once, and only when all ranks have one: a busy machine
# starts them so slowly that the silence before counts as a hang.
ANSWERS_ONCE = """
import os, pathlib, pickle, sys, threading, time
rank = int(os.environ["RANK"])
entry = {
    "process_group": ("0", "default_pg"), "p2p_seq_id": 0, "is_p2p": False,
    "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 3]], "input_dtypes": ["Float"],
    "retired": False, "frames": [], "collective_seq_id": 13 + (rank != 2), "state": "started",
}
config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
ready, go = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
(ready / str(rank)).touch()
while len(os.listdir(ready)) < 4:
    print("waits", flush=True)
    time.sleep(0.2)

pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe"
os.mkfifo(pipe)

def listen():
    with open(pipe) as asked:
        asked.read(1)
    os.unlink(pipe)
    file = pathlib.Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}")
    file.write_bytes(pickle.dumps({"entries": [entry], "pg_config": config}))

threading.Thread(target=listen, daemon=True).start()
while not go.exists():
    time.sleep(0.02)
"""
STUCK = "rank 2 has not joined collective 14"
ASKED = "collecting stacks"


def test_earlier_stacks_are_discarded(scene: Scene) -> None:
    ready, go = scene.folder / "ready", scene.folder / "go"
    ready.mkdir()
    file = scene.cluster_file(
        scene.script(ANSWERS_ONCE),
        args=[str(ready), str(go)],
        watchdog={"silence": "3s", "then": "report"},
    )
    launch = scene.launch(file)
    launch.until(STUCK)
    launch.until(ASKED, count=launch.stderr.count(ASKED) + 2)
    go.touch()
    done = launch.wait()
    assert done.code == 0, str(done)
    assert done.stderr.count(STUCK) == 1
