"""The training scripts of scripts/recipes/, and their results in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.limits import HANG
from support.warm import TORCH, server

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
GPT = ["--width", "64", "--heads", "4", "--kv-heads", "4", "--context", "32"]
GPT += ["--every", "1", "--lr", "0.01", "--warmup", "1"]
"""A small model for train_gpt.py that learns in a few steps."""


def corpus(folder: Path) -> Path:
    """A small text: one module of the standard library."""
    file = folder / "text.py"
    file.write_text(Path(json.__file__).with_name("decoder.py").read_text() * 4)
    return file


def losses(file: Path) -> list[float]:
    """What a script wrote by ``--losses``, in the order of its steps."""
    by_step = {int(step): loss for step, loss in json.loads(file.read_text()).items()}
    return [by_step[step] for step in sorted(by_step)]


def alone(script: str, folder: Path, options: list[str]) -> list[float]:
    """The losses of one process without a launcher."""
    file = folder / "losses.json"
    imported = TORCH if script == "train_gpt.py" else ("tensorflow",)
    # With a thread for each core, those that wait would spin.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = server(*imported).start(
        RECIPES / script, *options, "--losses", file, environment=environment
    )
    output, _ = process.communicate(HANG)
    assert process.wait() == 0, output
    return losses(file)
