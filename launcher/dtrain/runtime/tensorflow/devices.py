"""Set up this process's devices before TensorFlow starts to use them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from dtrain.runtime.job import current_job
from dtrain.runtime.tensorflow.legacy_keras import keras
from dtrain.runtime.tensorflow.precision import keras_policy


def configure_devices(
    *,
    gpus: Sequence[int] | None = None,
    memory_growth: bool = True,
    memory_limit: int | None = None,
    logical_cpus: int = 1,
    precision: str | None = None,
    seed: int | None = None,
) -> None:
    """Say what this process may use, and how. Call it first, before any operation.

    ``gpus`` are indices among those that CUDA_VISIBLE_DEVICES leaves; without it all are used.
    ``memory_growth`` takes a GPU's memory as it is needed instead of all at once, ``memory_limit``
    (MiB on each GPU) at once but no more. ``logical_cpus`` divides the CPU into so many devices,
    to try on any machine what needs several. ``precision`` is a Keras policy (``mixed_bfloat16``,
    ``mixed_float16``, ``float32``) or ``bf16``, ``fp16``, ``fp32``; that of
    ``job.training`` goes before it. ``seed`` goes to Python, NumPy and TensorFlow.

    Raises RuntimeError when TensorFlow has started already, or sees no GPU where
    CUDA_VISIBLE_DEVICES names some and no ``gpus`` or ``logical_cpus`` ask for less; ValueError
    for a GPU that is not there or an unknown precision.
    """
    if gpus is None and logical_cpus == 1:
        _expect_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    try:
        _configure_gpus(gpus, memory_growth, memory_limit)
        if logical_cpus > 1:
            _divide(tf.config.list_physical_devices("CPU")[0], logical_cpus)
    except RuntimeError as error:
        raise RuntimeError(
            f"TensorFlow has started already ({error}): call configure_devices() before any"
            " operation and before init()"
        ) from None
    if policy := keras_policy(current_job().training.precision or precision):
        keras().mixed_precision.set_global_policy(policy)
    if seed is not None:
        keras().utils.set_random_seed(seed)


def _expect_gpus(visible: str) -> None:
    """TensorFlow itself would go on with the CPU, and say so in a line among many."""
    if visible not in ("", "-1") and not tf.config.list_physical_devices("GPU"):
        built = "" if tf.test.is_built_with_gpu_support() else ", built without GPU support,"
        raise RuntimeError(
            f"TensorFlow {tf.__version__}{built} sees no GPU, but CUDA_VISIBLE_DEVICES is"
            f" {visible}: look whether `nvidia-smi` works here and whether CUDA's libraries are"
            " installed (`pip install 'tensorflow[and-cuda]'`), or set 'gpus: 0' in the cluster"
            " file (CUDA_VISIBLE_DEVICES= by hand) to train on the CPU"
        )


def _configure_gpus(gpus: Sequence[int] | None, growth: bool, limit: int | None) -> None:
    found = tf.config.list_physical_devices("GPU")
    if gpus is not None:
        if missing := sorted(set(gpus) - set(range(len(found)))):
            raise ValueError(f"there is no GPU {missing[0]}: TensorFlow sees {len(found)}")
        found = [found[index] for index in gpus]
        tf.config.set_visible_devices(found, "GPU")
    for gpu in found:
        if limit is not None:
            # TensorFlow lets a device have a limit or growth, not both.
            configuration = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
            tf.config.set_logical_device_configuration(gpu, [configuration])
        else:
            tf.config.experimental.set_memory_growth(gpu, growth)


def _divide(device: tf.config.PhysicalDevice, parts: int) -> None:
    tf.config.set_logical_device_configuration(
        device, [tf.config.LogicalDeviceConfiguration()] * parts
    )
