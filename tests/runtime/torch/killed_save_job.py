"""Two ranks that save after step 1, and again after step 2: in that save rank 1 kills itself.

killed_save_job.py CHECKPOINTS
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch.distributed as dist
from oracle import BATCH, SEED, Rows, meta_model, optimizer_of
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from train_gpt import cross_entropy, first_weights

from dtrain.runtime import torch as parallel
from dtrain.runtime.torch import checkpoint


class Killed(FileSystemWriter):
    """Writes this rank's part and then stops."""

    def write_data(self, *arguments: Any) -> Any:
        written = super().write_data(*arguments)
        if dist.get_rank() == 1:
            written.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def main() -> None:
    with parallel.init("fsdp", training=parallel.Training(global_batch=BATCH)) as run:
        model = run.parallelize(meta_model(), loss=cross_entropy, init=first_weights, seed=SEED)
        optimizer = optimizer_of(model.parameters())
        batches = run.batches(Rows(), seed=SEED)
        for step, (inputs, targets) in enumerate(batches, start=1):
            model.gradients(inputs, targets)
            model.clip_gradients(1.0)
            model.step(optimizer)
            if step == 2:
                checkpoint.FileSystemWriter = Killed  # type: ignore[misc]
            checkpoint.save(sys.argv[1], step, model, optimizer, batches)


if __name__ == "__main__":
    main()
