#!/usr/bin/env python3
"""Makes three ranks fail together, and records their output for tests/failures/cascades.

    python scripts/record_cascades.py             all of them
    python scripts/record_cascades.py raised      these

A run on one machine cannot show NCCL or several clocks; these are not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from dtrain.failures.traceback import last_words

FOLDER = Path(__file__).parent.parent / "tests" / "failures" / "cascades"
RANKS = 3
PATIENCE = 60.0
"""Seconds that the other ranks may take after the first has ended."""

TORCH = """
import datetime, os, sys, time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])

def join(seconds=60):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))

def step():
    dist.all_reduce(torch.ones(1000))

def train(fail=None, failing=1):
    join()
    for number in range(10**9):
        step()
        if fail is not None and rank == failing and number == 50:
            fail()
"""
TENSORFLOW = """
import os, sys
import tensorflow as tf

rank = int(os.environ["RANK"])

def train(fail, failing=1):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = tf.Variable(1.0)

    def replica():
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, variable * 1.0)

    @tf.function
    def step():
        return strategy.run(replica)

    for number in range(10**9):
        step()
        if rank == failing and number == 50:
            fail()
"""
KILL = "lambda: os.kill(os.getpid(), 9)"
DATA = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, number):
        if rank == 1 and number == 40:
            {fail}
        return torch.ones(4)

join()
for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2):
    step()
"""

# The program of the ranks, and the rank that causes the failure.
CASCADES: dict[str, tuple[str, str, int]] = {
    "killed": (TORCH, f"train({KILL})", 1),
    "killed-with-the-store": (TORCH, f"train({KILL}, failing=0)", 0),
    "raised": (
        TORCH,
        "def fail():\n    raise ValueError('bad batch at step 50')\ntrain(fail, failing=2)",
        2,
    ),
    "exited": (TORCH, "train(lambda: os._exit(7))", 1),
    "crashed": (TORCH, "import ctypes\ntrain(lambda: ctypes.string_at(0))", 1),
    "out-of-memory": (TORCH, "train(lambda: torch.empty(1 << 50), failing=2)", 2),
    "bad-data": (TORCH, DATA.format(fail="raise KeyError('image_0040.jpg')"), 1),
    "data-worker-killed": (TORCH, DATA.format(fail="os.kill(os.getpid(), 7)"), 1),
    "other-model": (
        TORCH,
        "join()\ntorch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2 + (rank == 1)))",
        1,
    ),
    "missing-module": (TORCH, "if rank == 2:\n    import no_such_module\njoin(5)", 2),
    "died-before-joining": (TORCH, "if rank == 2:\n    sys.exit('no data')\njoin(5)", 2),
    "port-taken": (TORCH, "join(5)", 0),
    "tensorflow-killed": (TENSORFLOW, f"train({KILL})", 1),
    "tensorflow-killed-first": (TENSORFLOW, f"train({KILL}, failing=0)", 0),
    "tensorflow-raised": (
        TENSORFLOW,
        "def fail():\n    raise ValueError('bad batch at step 50')\ntrain(fail)",
        1,
    ),
    "tensorflow-out-of-memory": (TENSORFLOW, "train(lambda: tf.ones([1 << 40, 1 << 10]))", 1),
}


def record(name: str, port: int) -> dict[str, Any]:
    """Run a case and return the content of its file."""
    prelude, body, first = CASCADES[name]
    cluster = {"worker": [f"127.0.0.1:{port + rank}" for rank in range(RANKS)]}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(prelude + "\n" + body + "\n", encoding="utf-8")
        # It listens, but does not speak the store's protocol.
        taken = socket.create_server(("0.0.0.0", port)) if name == "port-taken" else None  # noqa: S104
        begun = time.monotonic()
        processes = []
        for rank in range(RANKS):
            task = {"cluster": cluster, "task": {"type": "worker", "index": rank}}
            with (Path(folder) / f"{rank}.err").open("wb") as err:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script)],
                        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
                        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                        | {"OMP_NUM_THREADS": "1", "TF_CONFIG": json.dumps(task)},
                        stdout=subprocess.DEVNULL,
                        stderr=err,
                    )
                )
        ended = wait(processes, begun)
        if taken is not None:
            taken.close()
        versions = subprocess.run(
            [sys.executable, "-c", prelude.split("def ")[0] + VERSION],
            env={**os.environ, "RANK": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        ranks = []
        for rank, process in enumerate(processes):
            if rank not in ended:
                continue
            output = (Path(folder) / f"{rank}.err").read_bytes()[-(1 << 16) :]
            by_signal = process.returncode < 0
            ranks.append(
                {
                    "rank": rank,
                    "time": round(ended[rank], 3),
                    "code": None if by_signal else process.returncode,
                    "signal": signal.Signals(-process.returncode).name if by_signal else None,
                    "said": shown(last_words(output), folder),
                }
            )
    return {"with": versions.stdout.strip(), "script": body, "first": first, "ranks": ranks}


VERSION = """
modules = sys.modules
print("torch " + torch.__version__ if "torch" in modules else "TensorFlow " + tf.__version__)
"""


def wait(processes: list[subprocess.Popen[bytes]], begun: float) -> dict[int, float]:
    """Seconds after which each process ended. Processes that do not end are killed and left out."""
    ended: dict[int, float] = {}
    while len(ended) < len(processes):
        now = time.monotonic() - begun
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = now
        if ended and now > min(ended.values()) + PATIENCE:
            for process in processes:
                process.kill()
                process.wait()
            break
        time.sleep(0.001)
    return ended


def shown(output: str, folder: str) -> str:
    """The output without parts that are specific to this machine or add nothing."""
    output = output.replace(folder, "/home/user")
    output = re.sub(r"/[\w./-]*?/site-packages", "/opt/venv/lib/python3/site-packages", output)
    output = re.sub(r"/[\w./-]*/lib/python3\.\d+/(?!site-packages)", "/usr/lib/python3/", output)
    lines = [line.rstrip().expandtabs(4) for line in output.splitlines()]
    kept = [line for line in lines if not line or line.strip("^~ ")]
    return "".join(c for c in "\n".join(kept) if c.isprintable() or c == "\n")


class Text(str):
    """Text that YAML writes as a block, which keeps its lines readable."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *CASCADES], metavar="NAME")
    names = parser.parse_args().names or list(CASCADES)
    yaml.SafeDumper.add_representer(
        Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        recorded = record(name, 31000 + 10 * number)
        recorded["script"] = Text(recorded["script"])
        for rank in recorded["ranks"]:
            rank["said"] = Text(rank["said"]) if rank["said"] else ""
        text = yaml.safe_dump(recorded, sort_keys=False, allow_unicode=True, width=10000)
        (FOLDER / f"{name}.yaml").write_text(text, encoding="utf-8")
        print(name, [(r["time"], r["code"], r["signal"]) for r in recorded["ranks"]], flush=True)


if __name__ == "__main__":
    main()
