"""Every rank refuses models that a layout cannot split, and names the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.torch.ranks import HERE, run

pytestmark = pytest.mark.torch

REASONS = {
    "fused": "blocks.0.attention.qkv (Linear): a rank's share of a fused projection would mix",
    "unknown linear": "blocks.0.mlp.mystery (Linear): declare whether it opens or closes its layer",
    "another module": "cannot place blocks.1.mlp_norm (PReLU)",
    "heads": "tensor 2 does not divide the 1 heads of blocks.0.attention.k_proj",
    "vocabulary": "tensor 2 does not divide out_features 63 of head",
    "all heads": "let the model split them as view(batch, sequence, -1, head_dim)",
    "halved heads": "the ranks' inputs to attention.o_proj do not add up to the input",
    "by hand": "the ranks' inputs to attention.o_proj do not add up to the input",
    "more than the stream": "residual stream as its only input (AssertionError: no mask)",
    "experts": "cannot tell how blocks.0 uses its list 'mlp.experts'",
    "no experts": "GPT has no experts for expert 2: build them with",
    "experts and tensor": "tensor parallelism does not split the experts of blocks.0",
    "sequence": "sequence_parallel cannot split sequences of 15 over tensor 2",
    "batch": "part of a global batch of 8 is 4 samples, not 3",
    "context, sequence": "context 2 cannot split sequences of 18 into two chunks for each rank",
    "context, by hand": "blocks.0 computes a different result on a share of a sequence",
    "context, masked": "residual stream as its only input (AssertionError: no mask)",
    "context, two embeddings": "WithPositions.forward() computes between its modules",
    "tied": "head.weight is tied to embedding.weight, but a pipeline puts them on different",
    "two embeddings": "WithPositions.forward() computes between its modules",
    "too many stages": "2 blocks cannot fill 4 pipeline stages",
    "frozen stage": "not train the stages behind a frozen first stage (embedding, blocks.0): use",
    "no blocks": 'name the list: parallelize(model, ..., blocks="layers")',
    "not initialized": "nothing initializes norm.weight: define",
    "not initialized on one stage": "nothing initializes norm.weight: define",
    "integer buffer": "nothing initializes positions.ids: define",
    "different weights": "different weights: call torch.manual_seed with the same seed on all",
}


def test_refusals(tmp_path: Path) -> None:
    run(2, HERE / "refusals_job.py", tmp_path)
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report.keys() == REASONS.keys()
        for name, reason in REASONS.items():
            assert reason in report[name], name
