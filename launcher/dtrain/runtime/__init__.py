"""What a training script may import. It needs nothing but the script's own framework.

    from dtrain.runtime import progress, stop_requested
    from dtrain.runtime import torch as parallel        # needs PyTorch
    from dtrain.runtime import tensorflow as distributed   # needs TensorFlow

A launch brings this package to every host; a script started by hand finds it where dtrain is
installed, and runs on its own, as the only process of its job.
"""

from dtrain.runtime import learning_rate
from dtrain.runtime.job import Job, current_job
from dtrain.runtime.layout import Layout, Training
from dtrain.runtime.progress import progress
from dtrain.runtime.stopping import catch_sigterm, stop_requested

__all__ = [
    "Job",
    "Layout",
    "Training",
    "catch_sigterm",
    "current_job",
    "learning_rate",
    "progress",
    "stop_requested",
]
