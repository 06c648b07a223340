"""Tensors that Keras on TensorFlow keeps, read from its graphs. A program that prints JSON.

`python keras_oracle.py blocks POLICY gelu|swiglu` sums what the backward pass of one transformer
block takes from its forward pass; `python keras_oracle.py facts` looks at what the planner says of
TensorFlow's ways of splitting.
"""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

HIDDEN, HEADS, KV_HEADS, FFN, TOKENS, BATCH = 256, 4, 2, 640, 128, 2
VIEWS = {"Reshape", "Identity", "IdentityN", "ExpandDims", "Squeeze", "StopGradient"}


class Block(keras.layers.Layer):
    def __init__(self, gated):
        super().__init__()
        self.gated = gated
        norm = keras.layers.RMSNormalization if gated else keras.layers.LayerNormalization
        dense = keras.layers.Dense
        self.before, self.between = norm(), norm()
        self.attention = keras.layers.GroupQueryAttention(
            HIDDEN // HEADS, HEADS, KV_HEADS, use_bias=not gated
        )
        self.up = dense(FFN, use_bias=not gated)
        self.gate = dense(FFN, use_bias=False)
        self.down = dense(HIDDEN, use_bias=not gated)

    def call(self, x):
        y = self.before(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        y = self.between(x)
        if self.gated:
            return x + self.down(keras.ops.silu(self.gate(y)) * self.up(y))
        return x + self.down(keras.ops.gelu(self.up(y)))


def base(tensor):
    """The tensor that a view refers to."""
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def blocks(policy, gated):
    """Bytes that one of two blocks saves for each token, and bytes of 16-bit copies of weights."""
    keras.mixed_precision.set_global_policy(policy)
    kind = tf.as_dtype(keras.mixed_precision.dtype_policy().compute_dtype)
    model = [Block(gated), Block(gated)]
    x = tf.ones((BATCH, TOKENS, HIDDEN), kind)
    for block in model:
        x = block(x)
    weights = [w for block in model for w in block.trainable_variables]
    forward = []

    def step(x_in):
        with tf.GradientTape() as tape:
            tape.watch(x_in)
            x = x_in
            for block in model:
                x = block(x)
            loss = tf.reduce_sum(tf.cast(x, tf.float32))
        # The block before also needs the gradient of the input.
        forward.extend(x.graph.get_operations())
        return tape.gradient(loss, [x_in, *(w.value for w in weights)])

    graph = tf.function(step).get_concrete_function(tf.TensorSpec(x.shape, kind)).graph
    before, needed, left = set(forward), set(), [t.op for t in graph.outputs]
    while left:
        operation = left.pop()
        if operation not in needed:
            needed.add(operation)
            left += [t.op for t in operation.inputs]
    saved = {
        found.name: found
        for operation in needed - before
        if operation.type != "Shape"
        for t in operation.inputs
        if t.op in before and t.dtype != tf.resource
        for found in [base(t)]
    }

    def of_weight(tensor):
        source = base(tensor.op.inputs[0]) if tensor.op.type == "Cast" else tensor
        return source.op.type == "ReadVariableOp"

    def size(tensor):
        return (tensor.shape.num_elements() or 0) * tensor.dtype.size

    copies = sum(size(t) for t in saved.values() if of_weight(t) and t.op.type == "Cast")
    kept = sum(size(t) for t in saved.values() if not of_weight(t))
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    optimizer.build(weights)
    count = sum(size(w.value) for w in weights) / 4
    slots = sum(size(v.value) for v in optimizer.variables if len(v.shape))
    return {
        "saved": kept / (len(model) * BATCH * TOKENS),
        "copies": copies / count,
        "variables": sum(tf.as_dtype(w.dtype).size for w in weights) / len(weights),
        "gradients": sum(t.dtype.size for t in graph.outputs[1:]) / len(weights),
        "slots": slots / count,
    }


def facts():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    found = {}
    query = tf.ones((1, 8, 2, 4))
    try:
        keras.ops.dot_product_attention(query, query, query, flash_attention=True)
    except ValueError as error:
        found["flash"] = str(error)

    mesh = dtensor.create_mesh([("data", 2), ("model", 2)], device_type="CPU")
    layout = dtensor.Layout(["data", "model"], mesh)
    weight = dtensor.DVariable(dtensor.call_with_layout(tf.zeros, layout, shape=(8, 8)))
    found["dtensor"] = [list(part.shape) for part in dtensor.unpack(weight.read_value())]

    devices = keras.distribution.DeviceMesh((2, 2), ("batch", "model"),
                                            [f"cpu:{n}" for n in range(4)])  # fmt: skip
    layouts = keras.distribution.LayoutMap(devices)
    layouts["dense.*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    dense = keras.layers.Dense(8, name="dense")
    dense.build((None, 8))
    found["model_parallel"] = [type(dense.kernel.value).__name__, list(dense.kernel.value.shape)]
    keras.distribution.set_distribution(None)

    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:0")
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile("adam", "mse")
    model.fit(tf.ones((16, 8)), tf.ones((16, 8)), verbose=0, batch_size=8)
    found["central_storage"] = sorted(
        {v.value.device.rpartition("/")[2] for v in (*model.variables, *model.optimizer.variables)}
    )
    return found


if __name__ == "__main__":
    task, *rest = sys.argv[1:]
    print(json.dumps(facts() if task == "facts" else blocks(rest[0], rest[1] == "swiglu")))
