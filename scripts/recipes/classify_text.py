#!/usr/bin/env python3
"""Classifies texts with TensorFlow and Keras's fit, under any of its distribution strategies.

    python classify_text.py                                   one process, no launcher
    DTRAIN_STRATEGY=one_device python classify_text.py        one host, by hand
        dtrain launch CLUSTER.yaml                                the strategy in job.strategy

By default it learns from which package of Python's standard library a passage of source code comes.
With --data (the folder aclImdb) it learns whether IMDb reviews are good or bad. Under parameter
servers the embedding, by far the largest variable, is partitioned among them.

classify_images.py also has a custom loop, which model_parallel over several hosts needs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import numpy as np
import tensorflow as tf

from dtrain.runtime import current_job
from dtrain.runtime import tensorflow as distributed

keras = distributed.keras()
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "urllib", "xml")
HELD_OUT = 0.2
"""The last part of every source file, never trained on."""
WORD = re.compile(r"\w+|[^\w\s]")


class Data(NamedTuple):
    """Texts as word numbers of shape (samples, words), and their classes."""

    texts: np.ndarray
    labels: np.ndarray
    test_texts: np.ndarray
    test_labels: np.ndarray
    classes: int


def numbers(text: str, buckets: int) -> list[int]:
    """A number of 1 or more for every word.

    Words are hashed (Weinberger et al., arXiv 0902.2206), not looked up: hosts with slightly
    different corpora would collect different vocabularies for the same model.
    """
    return [1 + zlib.crc32(word.encode()) % (buckets - 1) for word in WORD.findall(text.lower())]


def packages(length: int, buckets: int) -> Data:
    """Passages of ``length`` words from the packages of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    trained: list[tuple[list[int], int]] = []
    held: list[tuple[list[int], int]] = []
    for label, package in enumerate(PACKAGES):
        for path in sorted((root / package).rglob("*.py")):
            words = numbers(path.read_text(errors="replace"), buckets)
            cut = int(len(words) * (1 - HELD_OUT))
            trained += ((passage, label) for passage in passages(words[:cut], length))
            held += ((passage, label) for passage in passages(words[cut:], length))
    if not trained or not held:
        raise SystemExit(f"no source of {', '.join(PACKAGES)} under {root}: pass texts with --data")
    return Data(*arrays(trained), *arrays(held), len(PACKAGES))


def passages(words: list[int], length: int) -> Iterator[list[int]]:
    for start in range(0, len(words) - length + 1, length):
        yield words[start : start + length]


def reviews(folder: Path, length: int, buckets: int) -> Data:
    """IMDb reviews (Maas et al., 2011): 25 000 to train on and as many held out."""

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        samples = []
        for label, mood in enumerate(("neg", "pos")):
            for path in sorted((folder / part / mood).glob("*.txt")):
                words = numbers(path.read_text(encoding="utf-8"), buckets)[:length]
                samples.append((words + [0] * (length - len(words)), label))
        if not samples:
            raise SystemExit(f"no reviews in {folder / part}: --data needs the folder aclImdb")
        return arrays(samples)

    return Data(*read("train"), *read("test"), 2)


def arrays(samples: list[tuple[list[int], int]]) -> tuple[np.ndarray, np.ndarray]:
    texts, labels = zip(*samples, strict=True)
    return np.array(texts, np.int32), np.array(labels, np.int32)


def make_layers(arguments: argparse.Namespace, classes: int) -> list[Any]:
    """Convolution over words, then the strongest response of each filter (Kim, arXiv 1408.5882).
    Seeds give every process the same initial weights."""
    weights = {"kernel_initializer": keras.initializers.GlorotUniform(arguments.seed)}
    meanings = keras.initializers.RandomUniform(-0.05, 0.05, arguments.seed)
    return [
        keras.layers.Embedding(arguments.words, arguments.width, embeddings_initializer=meanings),
        keras.layers.Conv1D(2 * arguments.width, 5, activation="relu", **weights),
        keras.layers.GlobalMaxPooling1D(),
        keras.layers.Dense(arguments.width, activation="relu", **weights),
        keras.layers.Dense(classes, dtype="float32", **weights),
    ]


def make_model(arguments: argparse.Namespace, run: distributed.StrategyRun, classes: int) -> Any:
    """A compiled model with its variables placed by the strategy."""
    layers = make_layers(arguments, classes)
    if run.name == "model_parallel":
        model = distributed.placed(layers, (arguments.length,), run)
    else:
        with run.strategy.scope():
            model = keras.Sequential(layers)
            model.build((None, arguments.length))
    with run.strategy.scope():
        optimizer = keras.optimizers.Adam(arguments.lr)
        # Its variables must exist before a checkpoint is restored.
        optimizer.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(distributed.with_loss_scaling(optimizer), loss)
    return model


def train(
    arguments: argparse.Namespace,
    run: distributed.StrategyRun,
    model: Any,
    data: Data,
    checkpoints: distributed.Checkpoints | None,
) -> dict[int, float]:
    """Train up to ``--steps``, from the newest checkpoint if there is one. Returns the losses."""
    losses: dict[int, float] = {}
    done = checkpoints.restore() if checkpoints else 0
    if done >= arguments.steps:
        return losses

    def batches(each: Any = None) -> tf.data.Dataset:
        batch = arguments.batch
        return distributed.dataset(
            (data.texts, data.labels),
            run,
            each.get_per_replica_batch_size(batch) if each else batch,
            shuffle=len(data.labels),
            seed=arguments.seed,
            skip=done,
        )

    def report(step: int, loss: float) -> None:
        losses[step] = loss
        if run.is_chief and (step % arguments.every == 0 or step == 1):
            print(f"step {step}/{arguments.steps} loss {loss:.4f}", flush=True)

    callbacks = distributed.callbacks(
        run,
        total=arguments.steps,
        done=done,
        checkpoints=checkpoints,
        save_every=arguments.save_every,
        logdir=arguments.logdir,
        on_step=report,
    )
    for first, last, length in distributed.epochs(run, arguments.steps - done, arguments.every):
        model.fit(
            # Under parameter servers, each worker creates its own.
            keras.utils.experimental.DatasetCreator(batches) if run.asynchronous else batches(),
            initial_epoch=first,
            epochs=last,
            steps_per_epoch=length,
            shuffle=False,  # the dataset is shuffled
            verbose=0,
            callbacks=callbacks,
        )
        if model.stop_training:
            break
    return losses


def accuracy(model: Any, data: Data) -> float:
    """The share of held-out texts that the model classifies correctly."""
    right = 0
    for start in range(0, len(data.test_labels), 500):
        part = slice(start, start + 500)
        scores = model(data.test_texts[part], training=False)
        right += int(np.sum(np.argmax(scores, axis=1) == data.test_labels[part]))
    return right / len(data.test_labels)


def evaluate(
    arguments: argparse.Namespace, model: Any, data: Data, checkpoints: distributed.Checkpoints
) -> None:
    """The evaluator's task: the accuracy of each checkpoint when it appears."""
    for step in checkpoints.follow():
        print(f"evaluator: step {step} held-out accuracy {accuracy(model, data):.3f}", flush=True)
        if step >= arguments.steps:
            return


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="IMDb: the folder aclImdb")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="texts in a global batch")
    parser.add_argument("--length", type=int, default=100, help="words in a text")
    parser.add_argument("--words", type=int, default=20_000, help="hash buckets for words")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="steps between two reports")
    parser.add_argument("--checkpoint", type=Path, help="where to save, and to resume from")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--logdir", type=Path, help="events for TensorBoard")
    parser.add_argument("--losses", type=Path, help="file for each step's loss, as JSON")
    parser.add_argument("--cpus", type=int, default=1, help="logical CPUs, to test several devices")
    arguments = parser.parse_args()
    # The cluster file takes precedence.
    arguments.batch = current_job().training.global_batch or arguments.batch
    return arguments


def main() -> None:
    arguments = parse_arguments()
    distributed.configure_devices(
        logical_cpus=arguments.cpus, precision=arguments.precision, seed=arguments.seed
    )
    if distributed.serve():
        return
    run = distributed.init()
    print(run, flush=True)
    if arguments.data:
        data = reviews(arguments.data, arguments.length, arguments.words)
    else:
        data = packages(arguments.length, arguments.words)
    model = make_model(arguments, run, data.classes)
    checkpoints = None
    if arguments.checkpoint:
        # The model includes its optimizer.
        checkpoints = distributed.Checkpoints(
            arguments.checkpoint, run, model=model, optimizer=model.optimizer
        )
    if run.is_evaluator:
        if checkpoints is None:
            raise SystemExit("an evaluator reads checkpoints: pass --checkpoint DIR")
        evaluate(arguments, model, data, checkpoints)
        return
    if arguments.logdir:
        distributed.tensorboard(arguments.logdir)
    losses = train(arguments, run, model, data, checkpoints)
    if run.is_chief:
        if arguments.losses:
            arguments.losses.write_text(json.dumps(losses))
        print(f"held-out accuracy {accuracy(model, data):.3f}", flush=True)
    distributed.meet(run)


if __name__ == "__main__":
    main()
