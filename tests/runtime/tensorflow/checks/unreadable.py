"""The newest checkpoints are damaged: a run continues from the one before them."""

from pathlib import Path

import tensorflow as tf

from dtrain.runtime import tensorflow as distributed

FOLDER = Path("checkpoints")
run = distributed.init("none")


def found() -> tuple[int, float]:
    """The step and the value that a run starts with."""
    saved, value = checkpoints()
    return saved.restore(), float(value)


def checkpoints() -> tuple[distributed.Checkpoints, tf.Variable]:
    module = tf.Module()
    module.value = tf.Variable(0.0)
    return distributed.Checkpoints(FOLDER, run, owner=module), module.value


def file(step: int, kind: str) -> Path:
    (path,) = FOLDER.glob(f"ckpt-{step}.{kind}*")
    return path


assert found() == (0, 0.0)
saved, value = checkpoints()
for step in (1, 2, 3):
    value.assign(10.0 * step)
    saved.save(step)
assert found() == (3, 30.0)

data = file(3, "data")
data.write_bytes(data.read_bytes()[:-4])
assert found() == (2, 20.0)
file(2, "index").unlink()
assert found() == (1, 10.0)

file(1, "data").write_bytes(b"")
try:
    found()
except (IndexError, tf.errors.OpError) as error:
    print("refused:", error)
else:
    raise AssertionError("a new training began beside damaged checkpoints")
print("all found")
