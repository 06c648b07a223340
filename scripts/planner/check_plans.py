#!/usr/bin/env python3
"""Plans 20 models on 10 clusters, and dry-runs the file of each plan.

    scripts/planner/check_plans.py [MODEL ...]

Prints a line for each pair: the layout, or that nothing fits. Ends with 1 if a file has warnings or
a dry run refuses one. The tests do this for 2 models on each cluster.
"""

from __future__ import annotations

import sys

import dtrain
from dtrain.diagnostics import DtrainError
from dtrain.launchplan.build import build
from dtrain.parallelism.answer.explain import brief
from dtrain.planning.written import written
from dtrain.spec.load import parse

MODELS = (
    "gpt2", "gpt2-xl", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b",
    "llama-3.1-405b", "mistral-7b", "mixtral-8x7b", "mixtral-8x22b", "qwen2.5-0.5b", "qwen2.5-7b",
    "qwen2.5-72b", "qwen3-30b-a3b", "gemma-2-9b", "falcon-40b", "bloom-176b", "gpt-3-175b",
    "deepseek-v3",
)  # fmt: skip
CLUSTERS = (
    ("rtx-4090", 4), ("a100-80gb", 64), ("a100-40gb", 16), ("h100-80gb", 8), ("h100-80gb", 256),
    ("h200", 32), ("b200", 64), ("v100-32gb", 32), ("l40s", 16), ("mi300x", 64),
)  # fmt: skip


def check(model: str, gpu: str, gpus: int) -> tuple[bool, str]:
    """Whether the plan's file launches without warnings, and what to print."""
    answer = dtrain.plan(dtrain.PlanRequest(model=model, gpu=gpu, gpus=gpus))
    if not answer.fits:
        return True, "nothing fits"
    file = f"{model}.yaml"
    try:
        spec = parse(written(answer, None, file=file), file)
        build(spec)
    except DtrainError as error:
        return False, f"REFUSED: {error}"
    if spec.warnings:
        return False, f"WARNING: {spec.warnings[0].message}"
    return True, brief(answer.best)


def main() -> int:
    failed = 0
    for model in sys.argv[1:] or MODELS:
        for gpu, gpus in CLUSTERS:
            good, text = check(model, gpu, gpus)
            failed += not good
            print(f"{model} on {gpus} x {gpu}: {text}", flush=True)
    print(f"{failed} plans do not launch cleanly")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
