"""The output for users: numbers with units, reasons, and text that fits the width."""

from __future__ import annotations

import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from dtrain.parallelism.answer import units
from support.limits import HANG

Shown = Callable[..., str]


def test_the_reference_problem_beats_the_textbook_layout(shown: Shown) -> None:
    text = shown("--model-size", "100B", "--tokens", "2T", "--price-per-gpu-hour", "2")
    assert "64 x a100-80gb in 8 hosts of 8, 1600 Gb/s between hosts (assumed" in text
    sentence = re.search(
        r"Splitting the model only inside each host \(tensor \d[^)]*\) and copying it to all 8 "
        r"hosts, the textbook answer, needs (\d+) GB \((\d+) GiB\) on each GPU",
        text,
    )
    assert sentence
    assert int(sentence[1]) >= 200
    assert int(sentence[2]) == pytest.approx(int(sentence[1]) / 1.0737, rel=0.01)
    instead = re.search(r"What fits instead: (.+?), ([\d.]+) GiB\.", text)
    assert instead
    assert float(instead[2]) < 80
    assert re.search(r"2\.0T tokens take [\d,]+ days on 64 GPUs: .* GPU-hours", text)
    # Three digits, as the estimate has no more: the range of published rates hardly shows.
    days = r"[\d,]+0 days( \([\d,]+0 to [\d,]+0 with other published rates\))?"
    assert re.search(rf"With failures, expect {days} and [\d,]+0,000 GPU-hours", text)
    assert re.search(r"The GPUs use at most [\d,.]+ MWh, at 400 W each", text)
    assert re.search(r"[\d,]+ GPU-hours at a price of 4,\d\d0,000, a goodput of", text)
    assert (
        "a failure every 32 d 23 h (3.8 per 1,000 node-days of 8 GPUs, the rate of Llama 3)" in text
    )
    assert re.search(r"MFU \d+ % \(non-causal attention; \d+ % causal\)", text)
    # Alternatives are compared with numbers.
    rivals = text.partition("Why not another layout")[2]
    assert re.search(r"Plain DDP \(.*?\): does not fit: it needs at least [\d,]+ GiB", rivals)
    assert re.search(r"FSDP alone \(.*?\): \d+ % slower, [\d.]+ s a step \(\+[\d.]+ m?s ", rivals)


def test_a_training_that_ends_only_with_fewer_failures(shown: Shown) -> None:
    slow = ("--model-size", "100B", "--gpus", "16384", "--tokens", "10T", "--storage-gbs", "0.04")
    assert re.search(
        r"With failures, expect [\d,]+ days \([\d,]+ days with the lowest published rate, no end "
        r"with the highest\) and ",
        shown(*slow),
    )


def test_one_layout_is_evaluated_even_if_it_does_not_fit(
    shown: Shown, plan: Callable[..., dict[str, Any]]
) -> None:
    fixed = (
        "--model-size", "100B", "--tensor", "8", "--pipeline", "1", "--context", "1", "--data",
        "8", "--sharding", "none", "--micro-batch", "1", "--recompute", "none",
    )  # fmt: skip
    text = shown(*fixed)
    assert "This layout does not fit on 64 x a100-80gb: tensor 8 x data 8." in text
    assert re.search(r"needs [\d.]+ GiB: [\d.]+ GiB more than its [\d.]+ GiB usable", text)
    assert "With --sharding full" in text
    assert "Without the constraints" in text
    found = plan(*fixed)
    (layout,) = found["layouts"]
    assert (layout["fits"], layout["tensor"], layout["data"]) == (False, 8, 8)
    assert (layout["recompute"], layout["offload"]) == ("none", False)
    memory = layout["memory_gib"]
    assert f"{memory['total'] - memory['limit']:.1f} GiB more" in text


def test_the_cost_of_constraints_is_shown(shown: Shown) -> None:
    text = shown("--model-size", "100B", "--tensor", "2")
    assert re.search(r"Without the constraints, .* the constraints cost [\d.]+ %\.", text)


@pytest.mark.parametrize(
    ("job", "columns"),
    [
        (("--model-size", "100B"), 60),
        (("--model", "mixtral-8x7b", "--gpus", "16", "--gpu", "h100"), 80),
        (("--model-size", "1T", "--gpus", "8"), 60),
        (("--model-size", "100B", "--framework", "tensorflow"), 140),
    ],
    ids=str,
)
def test_a_pipe_gets_plain_ascii_that_fits(dtrain: Any, job: tuple[str, ...], columns: int) -> None:
    done = dtrain("plan", *job, COLUMNS=str(columns))
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    long = [line for line in done.stdout.splitlines() if len(line) > max(columns, 80)]
    assert long == []
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]
    assert "\n\n\n" not in done.stdout


def on_terminal(cwd: Path, columns: int, *argv: str, **environment: str) -> str:
    """The output of `dtrain` on a terminal with this many columns."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain_cli", *argv],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "xterm", **environment},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    written = b""
    with suppress(OSError):
        while select.select([leader], [], [], HANG)[0] and (chunk := os.read(leader, 65536)):
            written += chunk
    os.close(leader)
    assert process.wait(timeout=HANG) == 0
    return written.decode()


def test_a_terminal_gets_bars_and_color_unless_disabled(tmp_path: Path) -> None:
    argv = ("plan", "--model-size", "1B", "--gpus", "8")
    text = on_terminal(tmp_path, 80, *argv)
    assert "█" in text
    assert "\x1b[1m" in text
    plain = on_terminal(tmp_path, 80, *argv, NO_COLOR="1")
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 80


@pytest.mark.parametrize("columns", [40, 50, 60, 70, 80])
def test_the_table_of_layouts_leaves_out_columns_but_no_digits(
    tmp_path: Path, columns: int
) -> None:
    argv = ("plan", "--model", "llama-3-70b", "--gpus", "128", "--gpu", "h100")
    text = on_terminal(tmp_path, columns, *argv, NO_COLOR="1").replace("\r", "")
    table = text.partition("Best distinct layouts\n")[2]
    titles, *rows = [line.split() for line in table.splitlines()[:9]]
    assert titles[:4] == ["TP", "PP", "CP", "DP"]
    assert all(128 % math.prod(map(int, row[:4])) == 0 for row in rows)
    assert any(row[3] == "128" for row in rows)
    assert ("no room here for" in " ".join(text.split())) == ("causal" not in titles)


def test_assumptions_about_the_cluster_are_shown(shown: Shown) -> None:
    model = ("--model-size", "1B", "--gpus", "8")
    assert "assumed" in shown(*model)
    asked = (*model, "--gpu", "rtx-4090", "--global-batch", "64")
    assert "between hosts (assumed: --gpus-per-host 4, --network-gbps 10)" in shown(*asked)
    asked = (*asked, "--gpus-per-host", "2")
    assert "hosts of 2, 10 Gb/s between hosts (assumed: --network-gbps 10)" in shown(*asked)
    assert "assumed" not in shown(*asked, "--network-gbps", "25")
    # One host needs neither.
    assert "assumed" not in shown(*model, "--gpu", "h100", "--global-batch", "64")


def test_a_gpu_without_bf16_uses_another_precision(shown: Shown) -> None:
    text = shown("--model-size", "1B", "--gpus", "8", "--gpu", "v100-32gb")
    assert "v100-32gb does not support bf16: planned for fp16" in text


@pytest.mark.parametrize(("gpu", "gain"), [("h100", "7.4"), ("rtx-4090", ""), ("v100-32gb", "")])
def test_fp32_has_a_note_where_tf32_is_much_faster(shown: Shown, gpu: str, gain: str) -> None:
    text = shown("--model-size", "1B", "--gpus", "8", "--gpu", gpu, "--precision", "fp32")
    assert ("--precision tf32" in text) == bool(gain)
    assert f"{gain} times as high" in text or not gain


def test_one_gpu_that_is_too_small(shown: Shown) -> None:
    text = shown("--model", "llama-3-8b", "--gpus", "1", "--gpu", "rtx-4090")
    assert "To fine-tune only adapters, with --lora-rank 16 and --base-bits 4, one GPU" in text
    text = shown("--model", "gpt2-xl", "--gpus", "1", "--gpu", "rtx-3090")
    assert "2 x rtx-3090 (1 host of 2) would suffice" in text
    assert "The optimizer on the GPU (one GPU" in text
    assert "DDP" not in text


def test_a_short_training_takes_minutes(shown: Shown) -> None:
    text = shown("--model", "gpt2", "--gpus", "1", "--gpu", "h100", "--tokens", "10M")
    assert re.search(r"10\.0M tokens take \d+ s on 1 GPU: 153 steps, 0\.\d+ GPU-hours", text)
    assert re.search(r"The GPUs use at most [\d.]+ kWh, at", text)


@pytest.mark.parametrize(
    ("ratio", "slow", "fast"),
    [
        (0.9996, "as fast", "as fast"),
        (1.0004, "as fast", "as fast"),
        (1.123, "12 % slower", "12 % faster"),
        (1.994, "99 % slower", "99 % faster"),
        (1.995, "2.0 times as long", "2.0 times as fast"),
        (2.34, "2.3 times as long", "2.3 times as fast"),
        (13.7, "14 times as long", "14 times as fast"),
    ],
)
def test_large_ratios_are_factors(ratio: float, slow: str, fast: str) -> None:
    assert (units.slower(ratio), units.faster(ratio)) == (slow, fast)


def test_counts_of_layers_and_gpus_are_readable(shown: Shown) -> None:
    text = shown("--model", "llama-3.1-405b", "--gpu", "h100", "--gpus", "16384")
    assert re.search(r"cut the 126 layers into 16 pipeline stages of about 8", text)
    assert re.search(r"run [\d,]+ replicas of that", text)
    assert " 0 % " not in text
    small = shown("--model-size", "1B", "--gpus", "2048", "--global-batch", "4096")
    assert "opy the model to 2,048 GPUs" in small
    one = shown("--model-size", "1B", "--gpus", "8", "--global-batch", "7", "--micro-batch", "7")
    assert "A step is one micro-batch of 7 sequences." in one


def test_texts_are_about_the_accelerators_and_layouts_at_hand(shown: Shown) -> None:
    tpus = shown("--model-size", "7B", "--gpus", "8", "--gpu", "tpu-v5p")
    assert "device context" in tpus
    assert "CUDA" not in tpus
    assert "for offload" not in tpus
    away = shown("--model-size", "7B", "--gpus", "8", "--gpu", "tpu-v5e", "--offload")
    assert "in the hosts' memory (offload): " in " ".join(away.split())
    assert "PyTorch" not in away and "AdamW" not in away
    alone = shown("--model-size", "7B", "--gpus", "1", "--gpu", "a100-80gb")
    assert "and 50 % for offload" in " ".join(alone.split())
