"""Sets up this process's devices before TensorFlow uses them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from dtrain.runtime.job import current_job
from dtrain.runtime.tensorflow.legacy_keras import keras
from dtrain.runtime.tensorflow.precision import keras_policy, use_tensor_cores


def configure_devices(
    *,
    gpus: Sequence[int] | None = None,
    memory_growth: bool = True,
    memory_limit: int | None = None,
    logical_cpus: int = 1,
    precision: str | None = None,
    seed: int | None = None,
) -> None:
    """Configure the devices of this process. Call it first, before any operation.

    ``gpus`` are indices among the GPUs in CUDA_VISIBLE_DEVICES; the default is all of them.
    ``memory_growth`` allocates GPU memory on demand instead of all at once. ``memory_limit`` (MiB
    on each GPU) allocates at once, up to the limit. ``logical_cpus`` divides the CPU into that many
    devices, to test multi-device code on any machine. ``precision`` is a Keras policy
    (``mixed_bfloat16``, ``mixed_float16``, ``float32``) or ``bf16``, ``fp16``, ``tf32``, ``fp32``
    (without TF32, which is TensorFlow's default); ``job.training`` overrides it. ``seed`` seeds
    Python, NumPy and TensorFlow.

    Raises RuntimeError if TensorFlow has already started, or if it sees no GPU although
    CUDA_VISIBLE_DEVICES names some and neither ``gpus`` nor ``logical_cpus`` asks for fewer.
    Raises ValueError for a missing GPU or an unknown precision.
    """
    if gpus is None and logical_cpus == 1:
        _expect_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    try:
        _configure_gpus(gpus, memory_growth, memory_limit)
        if logical_cpus > 1:
            cpu = tf.config.list_physical_devices("CPU")[0]
            parts = [tf.config.LogicalDeviceConfiguration()] * logical_cpus
            tf.config.set_logical_device_configuration(cpu, parts)
    except RuntimeError as error:
        raise RuntimeError(
            f"TensorFlow has already started ({error}): call configure_devices() before any"
            " operation and before init()"
        ) from None
    chosen = current_job().training.precision or precision
    if policy := keras_policy(chosen):
        use_tensor_cores(chosen)
        keras().mixed_precision.set_global_policy(policy)
    if seed is not None:
        keras().utils.set_random_seed(seed)


def _expect_gpus(visible: str) -> None:
    """TensorFlow itself would continue on the CPU, with one line in a long log."""
    if visible not in ("", "-1") and not tf.config.list_physical_devices("GPU"):
        built = "" if tf.test.is_built_with_gpu_support() else ", built without GPU support,"
        raise RuntimeError(
            f"TensorFlow {tf.__version__}{built} sees no GPU, but CUDA_VISIBLE_DEVICES is"
            f" {visible}: check that `nvidia-smi` works here and that the CUDA libraries are"
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
            # TensorFlow allows a limit or growth on a device, not both.
            configuration = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
            tf.config.set_logical_device_configuration(gpu, [configuration])
        else:
            tf.config.experimental.set_memory_growth(gpu, growth)
