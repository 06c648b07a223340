"""Memory of Keras 3 on TensorFlow on one GPU, by part.

Derived from the graphs of Keras 3.15 on TensorFlow 2.21. The tests check that `saved` equals what
the backward pass of a real block uses of its forward pass. XLA may keep less.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from dtrain.parallelism.assumptions import COMMUNICATOR, CONTEXT
from dtrain.parallelism.cluster.hardware import GIB, Precision
from dtrain.parallelism.cost.memory import FRAGMENTATION
from dtrain.parallelism.model.shape import Shape
from dtrain.records import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that one GPU computes."""

    dense: int
    """Layers with one MLP."""
    moe: int
    """Layers with experts."""
    embedding: bool = True
    head: bool = True

    @staticmethod
    def whole(shape: Shape) -> Part:
        return Part(shape.layers - shape.moe_layers, shape.moe_layers)

    @property
    def layers(self) -> int:
        return self.dense + self.moe

    def parameters(self, shape: Shape) -> int:
        """Return the number of parameters. A matrix that embedding and output layer share counts
        for each."""
        count = self.dense * shape.layer_parameters(moe=False)
        count += self.moe * shape.layer_parameters(moe=True)
        if self.embedding:
            count += shape.embedding_parameters
        if self.head and not (shape.tied and self.embedding):
            count += shape.head_parameters
        if self.head:
            count += shape.norm_parameters // 2
        return count


@dataclass(frozen=True, slots=True)
class Way:
    """How the sequences of one step pass through a replica."""

    micro_batch: int
    grad_accumulation: int = 1
    recompute: Literal["none", "full"] = "none"
    """``full``: ``keras.RematScope`` around each layer (``tf.recompute_grad``)."""


@dataclass(frozen=True, slots=True)
class KerasMemory:
    """GiB on one GPU at the peak of a step."""

    parameters: float
    """Variables in 32 bits under every policy; if variables live elsewhere, their copies."""
    gradients: float
    optimizer: float
    copies: float
    """16-bit copies of the parameters, which the backward pass needs."""
    activations: float
    logits: float
    temporary: float
    """One layer's attention scores and, at the end, gradients packed to be reduced."""
    communication: float
    context: float
    fragmentation: float

    @property
    def total(self) -> float:
        """Total as the driver counts it, with TensorFlow's ``allow_growth``."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def on_gpu(
    shape: Shape,
    part: Part,
    way: Way,
    precision: Precision,
    *,
    replicas: int = 1,
    variables: bool = True,
    communicator: float = COMMUNICATOR,
) -> KerasMemory:
    """Return the memory of one of ``replicas`` GPUs that train ``part`` with Adam.

    Variables, gradients and Adam's two slots have 32 bits under every policy: a mixed policy casts
    variables on use (``keras/src/layers/layer.py``, autocast), so gradients pass back through the
    cast. Accumulation keeps one more sum (``keras/src/optimizers/base_optimizer.py``,
    ``gradient_accumulator``). Without ``variables``, the states live in a host's memory, and every
    step reads copies of the parameters. ``communicator``: as in `Assumptions`.
    """
    count = part.parameters(shape)
    tokens = way.micro_batch * shape.seq_len
    element = _element(precision)
    layers = [saved(shape, precision, moe=moe) for moe in (False, True)]
    fullest = layers[bool(part.moe)]
    scores = 8.0 * shape.heads * shape.seq_len * tokens if part.layers else 0.0
    if way.recompute == "full":
        activations = float(element) * shape.hidden * part.layers * tokens
        # During its recomputation, a layer holds everything that it saves.
        temporary = (fullest * tokens if part.layers else 0.0) + scores
        cast = shape.layer_parameters(moe=bool(part.moe)) if part.layers else 0
        cast += shape.head_parameters if part.head else 0
    else:
        activations = (layers[False] * part.dense + layers[True] * part.moe) * tokens
        temporary = scores
        cast = count - (shape.embedding_parameters if part.embedding and not shape.tied else 0)
    copies = 0.0 if element == 4 else 2.0 * cast
    # Logits, their copy in 32 bits, and the gradient from the loss's kernel.
    logits = (8.0 + (2.0 if element == 2 else 0.0)) * shape.vocab * tokens if part.head else 0.0
    if replicas > 1 and variables:
        # For the reduction, all gradients are packed into one tensor (``cross_device_utils.py``,
        # ``batch_all_reduce``; ``bytes_per_pack`` 0), after the backward pass freed its tensors.
        temporary += max(0.0, 4.0 * count - (copies + activations + logits + temporary))
    parameters = 4.0 * count
    gradients = 4.0 * count * (2 if variables and way.grad_accumulation > 1 else 1)
    optimizer = 8.0 * count if variables else 0.0
    used = parameters + gradients + optimizer + copies + activations + logits + temporary
    return KerasMemory(
        parameters=parameters / GIB,
        gradients=gradients / GIB,
        optimizer=optimizer / GIB,
        copies=copies / GIB,
        activations=activations / GIB,
        logits=logits / GIB,
        temporary=temporary / GIB,
        communication=communicator if replicas > 1 else 0.0,
        context=CONTEXT,
        fragmentation=FRAGMENTATION * used / GIB,
    )


def saved(shape: Shape, precision: Precision, *, moe: bool) -> float:
    """Return the bytes that one layer keeps for its backward pass, for each token.

    Keras has no flash attention on TensorFlow (``keras/src/backend/tensorflow/nn.py`` refuses
    it), so it keeps the score matrix: the softmax in 32 bits, its copy in the layer's type, and
    the causal mask for each head. Norms compute in 32 bits, and grouped keys and values are
    repeated for all heads.
    """
    e = _element(precision)
    h = shape.hidden
    wide = shape.heads * shape.head_size
    # Each norm: its input and the normalized input in 32 bits, and the output.
    terms = 2.0 * (4 + 4 + e) * h
    # Queries, repeated keys, repeated values, and attention's output.
    terms += 4 * e * wide
    terms += (4 + (2 if e == 2 else 0) + 1) * shape.heads * shape.seq_len
    width = (shape.dense_ffn_hidden if shape.experts else 0) or shape.ffn_hidden
    if moe:
        width = shape.ffn_hidden * (shape.experts_per_token + shape.shared_experts)
        # The tokens sent to experts, and the experts' outputs.
        terms += 2 * e * h * shape.experts_per_token
    # SwiGLU: both products, the activation, and the last product's input. GELU by tanh keeps its
    # input, the tanh, 1 + tanh, half of the input, and its output.
    terms += (4 if shape.gated else 5) * e * width
    if shape.dropout:
        # Masks of one byte, and the remaining scores.
        terms += 2 * h + (1 + e) * shape.heads * shape.seq_len
    return terms


def _element(precision: Precision) -> int:
    """Bytes of one activation; with fp8, Keras only rounds the inputs of products."""
    return 4 if precision in ("tf32", "fp32") else 2
