"""Runs the GPT recipe with several strategies, one after the other in one process group.

    strategies.py CASES.json FOLDER [RECIPE OPTIONS]

A case has the strategy and perhaps the layout that a launch would give it. Its losses go to
FOLDER/<name>.json.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "recipes"))
import torch.distributed as dist
import train_gpt

from dtrain.runtime import torch as parallel

cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
del sys.argv[1:3]
arguments = train_gpt.parse_arguments()
training = parallel.Training(global_batch=arguments.batch)
# `init` joins a group that exists and leaves it open. A group for each case would need a port each.
dist.init_process_group("gloo")
for name, (strategy, sizes) in cases.items():
    layout = parallel.Layout(**sizes) if sizes else None
    arguments.losses = folder / f"{name}.json"
    with parallel.init(strategy, layout, training) as run:
        train_gpt.train(run, arguments)
dist.destroy_process_group()
