"""Train a PyTorch model under any layout, with one training loop.

    from dtrain.runtime import torch as parallel

    with parallel.init() as run:
        with torch.device("meta"):
            model = GPT(config)
        model = run.parallelize(model, loss=cross_entropy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for inputs, targets in run.batches(dataset):
            loss = model.gradients(inputs, targets)
            model.clip_gradients(1.0)
            model.step(optimizer)

The layout is the cluster file's (``job.strategy``, ``job.layout``). Started by torchrun, the ranks
form the layout that `init` is given, or copy the model; started alone, the script trains in one
process.
"""

from dtrain.runtime.layout import Layout, Training
from dtrain.runtime.torch import checkpoint
from dtrain.runtime.torch.batches import Batches
from dtrain.runtime.torch.context import positions
from dtrain.runtime.torch.experts import MixtureOfExperts
from dtrain.runtime.torch.model import ParallelModel
from dtrain.runtime.torch.run import ParallelRun, init
from dtrain.runtime.torch.timing import StepTimer

__all__ = [
    "Batches", "Layout", "MixtureOfExperts", "ParallelModel", "ParallelRun", "StepTimer",
    "Training", "checkpoint", "init", "positions",
]  # fmt: skip
