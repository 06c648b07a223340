"""A small real training, by scripts/train_gpt.py, and what it does in one process alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
GPT = ["--width", "64", "--heads", "4", "--kv-heads", "4", "--context", "32"]
GPT += ["--every", "1", "--lr", "0.01", "--warmup", "1"]


def corpus(folder: Path) -> Path:
    """A small text: one module of the standard library."""
    file = folder / "text.py"
    file.write_text(Path(json.__file__).with_name("decoder.py").read_text() * 4)
    return file


def losses(file: Path) -> list[float]:
    """What a training wrote by ``--losses``, in the order of its steps."""
    by_step = {int(step): loss for step, loss in json.loads(file.read_text()).items()}
    return [by_step[step] for step in sorted(by_step)]


def alone(text: Path, folder: Path, *, steps: int, batch: int) -> list[float]:
    """The losses of one process that no launcher started."""
    file = folder / "losses.json"
    options = ["--data", text, "--steps", steps, "--batch", batch, "--losses", file, *GPT]
    command = [sys.executable, SCRIPTS / "train_gpt.py", *options]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=120)
    found = losses(file)
    assert len(found) == steps and found[-1] < found[0] - 0.3
    return found
