"""Input in global batches: the samples of all replicas in one step."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from dtrain.runtime.tensorflow.run import StrategyRun

Shard = Literal["auto", "file", "data", "off"]


def dataset(
    source: Any,
    run: StrategyRun,
    global_batch: int,
    *,
    shuffle: int = 0,
    seed: int = 0,
    repeat: bool = True,
    skip: int = 0,
    shard: Shard = "auto",
) -> tf.data.Dataset:
    """Batches of ``global_batch`` samples, which `StrategyRun.strategy` divides among its replicas.

    ``source`` is a dataset of single samples, or arrays with the samples along their first axis.
    ``shuffle`` is the size of the shuffle buffer, in samples; every process draws the same order
    from ``seed``. With ``repeat`` the source repeats forever, so that every batch is full. Without
    it there is one pass, and the last batch may be smaller. ``skip`` is the number of batches to
    leave out: the steps that a resumed run has already done.

    ``shard`` sets how several workers share the source. With ``file`` each worker reads every n-th
    file, with ``data`` its part of every batch. ``auto`` uses files if there are any. With ``off``
    every worker reads everything, for a source that already differs between them.

    Under parameter servers, a step runs on one worker, so ``global_batch`` is the batch of one
    worker, and every worker draws its own order. `Coordinator` divides it among the worker's GPUs.
    ``fit`` does not: it takes batches for one GPU.

    Raises ValueError for a training batch that the replicas cannot divide equally: their mean
    gradients would differ from the batch's.
    """
    if repeat and not run.asynchronous and global_batch % run.replicas:
        nearest = max(1, round(global_batch / run.replicas)) * run.replicas
        raise ValueError(
            f"a global batch of {global_batch} cannot be divided equally among {run.replicas}"
            f" replicas: {nearest} can"
        )
    data = source
    if not isinstance(source, tf.data.Dataset):
        data = tf.data.Dataset.from_tensor_slices(source)
    if shuffle and run.asynchronous:
        # Each worker runs this graph: with the graph's seed they would all draw the same batches.
        if not tf.executing_eagerly():
            tf.random.set_seed(None)
        data = data.shuffle(shuffle)
    elif shuffle:
        data = data.shuffle(shuffle, seed=seed)
    if repeat:
        data = data.repeat()
    data = data.batch(global_batch)
    if skip and not run.asynchronous:
        data = data.skip(skip)
    options = tf.data.Options()
    policy = getattr(tf.data.experimental.AutoShardPolicy, shard.upper())
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options).prefetch(tf.data.AUTOTUNE)
