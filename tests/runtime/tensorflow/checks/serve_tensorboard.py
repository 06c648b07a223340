"""Start TensorBoard and wait. Without TensorBoard, continue."""

import importlib.util
import signal

import tensorflow as tf

from dtrain.runtime import tensorflow as distributed

assert distributed.tensorboard("events") is None, "TensorBoard is off by default"
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "tensorboard" else find(name, *more)
assert distributed.tensorboard("events", insist=True) is None
importlib.util.find_spec = find

with tf.summary.create_file_writer("events").as_default():
    tf.summary.scalar("loss", 0.5, step=1)
board = distributed.tensorboard("events", insist=True)
assert board is not None
print(f"process {board._process.pid} port {board.port()}", flush=True)
signal.pause()
