"""The record of the FSDP oracle matches its output, and its count of a small model is right."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from support.oracles import ask
from support.warm import TORCH

pytestmark = pytest.mark.torch

RECORD = json.loads(Path(__file__).with_name("oracle_cases.json").read_text())
SMALL = [entry for entry in RECORD["entries"] if entry["case"]["name"].startswith("small-")]


@pytest.mark.parametrize("entry", SMALL, ids=lambda entry: entry["case"]["name"])
def test_the_record_matches_the_oracle(entry: dict[str, Any]) -> None:
    oracle = Path(__file__).with_name("fsdp_oracle.py")
    answer = ask(TORCH, oracle, json.dumps(entry["case"]))
    assert answer == entry["answer"]


def test_a_tiny_model_counted_by_hand() -> None:
    layers, h, heads, kv, ffn, vocab, s, ranks = 2, 256, 8, 64, 768, 8192, 128, 8
    entry = next(entry for entry in SMALL if entry["case"]["name"] == "small-llama")
    answer = entry["answer"]

    layer = 2 * h * h + 2 * h * kv + 3 * h * ffn + 2 * h
    root = 2 * vocab * h + h
    parameters = layers * layer + root
    assert answer["parameters"] == parameters
    stays = answer["between_steps"]
    assert stays["Sharded Param"] == 4 * parameters // ranks
    # Two moments in 32 bits, and one step counter for each of the parameter tensors.
    assert stays["OptState"] == 8 * parameters // ranks + 4 * (layers * 9 + 3)

    forward = answer["after_forward"]
    # Only the parameters of the root module are not sharded.
    assert forward["Unsharded Param"] == 2 * root
    # Kept for the backward of each token and layer: the residual stream twice, both norms'
    # outputs, query and attention's output (h each); key and value; four of the MLP; all in 16
    # bits. Then 1/rms of both norms and the softmax's sum for each head in 32.
    token = 2 * (6 * h + 2 * kv + 4 * ffn) + 4 * (2 + heads)
    dropout_seed = 3 * 8
    # After the layers: the last residual stream, the norm's output and 1/rms, the logits.
    end = 2 * h + 2 * h + 4 + 2 * vocab
    assert forward["Activation"] == s * (layers * token + end) + layers * dropout_seed

    # The highest of the cross-entropy: log-softmax, the loss's gradient and log-softmax's, in 32
    # bits each; the 16-bit logits are gone. Two scalars: the loss and its gradient.
    loss = answer["phases"]["loss"]
    assert loss["op"] == "aten._log_softmax_backward_data.default"
    others = forward["Activation"] - s * 2 * vocab
    assert loss["bytes"]["Activation"] + loss["bytes"]["Temp"] == others + s * 12 * vocab + 8

    # Parameters, gradients, two moments, and one temporary of the same size (foreach's √v).
    held = answer["phases"]["optimizer"]["bytes"]
    assert held["Sharded Grad"] == 4 * parameters // ranks
    assert held["OptState"] - stays["OptState"] == 4 * parameters // ranks


def test_the_record_is_from_this_torch() -> None:
    assert RECORD["torch"] == version("torch").split("+")[0], (
        "record again: python tests/parallelism/fsdp_oracle.py --record"
    )
