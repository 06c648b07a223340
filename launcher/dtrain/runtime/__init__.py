"""The API for training scripts. It needs only the script's own framework.

    from dtrain.runtime import phase, progress, stop_requested
    from dtrain.runtime import torch as parallel        # needs PyTorch
    from dtrain.runtime import tensorflow as distributed   # needs TensorFlow

A launch copies this package to every host. A script that is started by hand uses the installed
dtrain, and runs as the only process of its job.
"""

from dtrain.runtime import learning_rate
from dtrain.runtime.job import JobSettings, current_job
from dtrain.runtime.layout import Layout, Training
from dtrain.runtime.progress import phase, progress
from dtrain.runtime.stopping import catch_sigterm, stop_requested

__all__ = [
    "JobSettings", "Layout", "Training", "catch_sigterm", "current_job", "learning_rate", "phase",
    "progress", "stop_requested",
]  # fmt: skip
