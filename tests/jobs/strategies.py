"""Runs the GPT recipe with several strategies, one after the other in one process group.

    strategies.py CASES.json FOLDER [RECIPE OPTIONS]

A case has the strategy and perhaps the layout that a launch would give it, and recipe options of
its own; without a strategy it trains as the launch says. Its losses go to FOLDER/<name>.json. A
case with ``checkpoint`` saves there, in FOLDER, and resumes from what an earlier case saved; the
checkpoint of the last step is removed after each case, so that a later one has steps left.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "recipes"))
import torch.distributed as dist
import train_gpt

from dtrain.runtime import torch as parallel

cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
del sys.argv[1:3]
common = train_gpt.parse_arguments()
training = parallel.Training(global_batch=common.batch)
# `init` joins a group that exists and leaves it open. A group for each case would need a port each.
dist.init_process_group("gloo")
for name, case in cases.items():
    options = {**vars(common), **case.get("options", {}), "losses": folder / f"{name}.json"}
    if "checkpoint" in case:
        options["checkpoint"] = folder / case["checkpoint"]
    layout = parallel.Layout(**case["layout"]) if "layout" in case else None
    strategy = case.get("strategy")
    with parallel.init(strategy, layout, training if strategy else None) as run:
        train_gpt.train(run, argparse.Namespace(**options))
        if "checkpoint" in case and run.is_first:
            shutil.rmtree(options["checkpoint"] / f"step-{common.steps:08}")
dist.destroy_process_group()
