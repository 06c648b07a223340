"""Mixed precision: the Keras policy, and loss scaling for custom loops.

float16 gradients below 6e-8 become zero. So the loss is multiplied before the gradients are
computed, and the gradients are divided afterwards (Micikevicius et al., arXiv 1710.03740,
section 3.2). ``fit`` does this itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.runtime.tensorflow.legacy_keras import is_legacy, keras

_POLICIES = {
    "bf16": "mixed_bfloat16",
    "fp16": "mixed_float16",
    "tf32": "float32",
    "fp32": "float32",
}


def keras_policy(precision: str | None) -> str | None:
    """Keras's name for ``precision``. Raises ValueError if TensorFlow does not support it."""
    if precision is None:
        return None
    policy = _POLICIES.get(precision, precision)
    if policy not in _POLICIES.values():
        known = ", ".join([*_POLICIES, *dict.fromkeys(_POLICIES.values())])
        raise ValueError(f"TensorFlow has no precision {precision!r}; choose from {known}")
    return policy


def use_tensor_cores(precision: str | None) -> None:
    """Let GPUs multiply float32 matrices in TF32, or not, if ``precision`` says which of both.
    TensorFlow's default is TF32."""
    if precision in ("tf32", "fp32"):
        tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")


def with_loss_scaling(optimizer: Any) -> Any:
    """Wrap ``optimizer`` with dynamic loss scaling if the policy is ``mixed_float16``."""
    if keras().mixed_precision.global_policy().name != "mixed_float16":
        return optimizer
    if is_legacy(keras()):
        return keras().mixed_precision.LossScaleOptimizer(optimizer)
    return keras().optimizers.LossScaleOptimizer(optimizer)


def scaled_loss(loss: tf.Tensor, optimizer: Any) -> tf.Tensor:
    """The loss to differentiate. Call it inside the gradient tape."""
    # tf-keras and Keras 3 name it differently, and an optimizer without scaling has neither.
    for name in ("get_scaled_loss", "scale_loss"):
        if scale := getattr(optimizer, name, None):
            return scale(loss)
    return loss


def unscaled(gradients: Sequence[Any], optimizer: Any) -> Sequence[Any]:
    """Gradients of a `scaled_loss`, for ``optimizer.apply_gradients``."""
    # Keras 3 divides in apply_gradients.
    unscale = getattr(optimizer, "get_unscaled_gradients", None)
    return unscale(gradients) if unscale else gradients
