"""The API for TensorFlow training scripts. It needs TensorFlow, and tf-keras for some strategies
(see `keras`).

    from dtrain.runtime import tensorflow as distributed

    keras = distributed.keras()
    distributed.configure_devices(seed=0)
    if not distributed.serve():                 # worker and ps tasks under parameter servers
        run = distributed.init()
        with run.strategy.scope():
            model = ...
"""

from dtrain.runtime.stopping import stop_requested
from dtrain.runtime.tensorflow.callbacks import callbacks, epochs
from dtrain.runtime.tensorflow.checkpoints import Checkpoints
from dtrain.runtime.tensorflow.cluster import TfConfig, current_cluster
from dtrain.runtime.tensorflow.collectives import meet, stop_together, take_from_chief
from dtrain.runtime.tensorflow.coordinator import Coordinator
from dtrain.runtime.tensorflow.datasets import dataset
from dtrain.runtime.tensorflow.devices import configure_devices
from dtrain.runtime.tensorflow.legacy_keras import keras
from dtrain.runtime.tensorflow.mesh import device_mesh
from dtrain.runtime.tensorflow.placement import OnDevice, placed
from dtrain.runtime.tensorflow.precision import scaled_loss, unscaled, with_loss_scaling
from dtrain.runtime.tensorflow.replicated import replicated, sum_gradients
from dtrain.runtime.tensorflow.run import StrategyRun, init
from dtrain.runtime.tensorflow.serving import serve
from dtrain.runtime.tensorflow.tensorboard import TensorBoard, tensorboard

__all__ = [
    "Checkpoints", "Coordinator", "OnDevice", "StrategyRun", "TensorBoard", "TfConfig", "callbacks",
    "configure_devices", "current_cluster", "dataset", "device_mesh", "epochs", "init", "keras",
    "meet", "placed", "replicated", "scaled_loss", "serve", "stop_requested", "stop_together",
    "sum_gradients", "take_from_chief", "tensorboard", "unscaled", "with_loss_scaling",
]  # fmt: skip
