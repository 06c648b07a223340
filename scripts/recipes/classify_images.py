#!/usr/bin/env python3
"""Classifies images with TensorFlow, under any of its distribution strategies.

    python classify_images.py                                one process, no launcher
    DTRAIN_STRATEGY=mirrored python classify_images.py       one host, by hand
        dtrain launch CLUSTER.yaml                               the strategy in job.strategy

The script can train with Keras's fit (--loop fit) or with a custom loop (--loop custom), as an
example of each. By default it learns the handwritten digits beside it; --data takes CIFAR-10 (its
"python version", unpacked or not).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import numpy as np
import tensorflow as tf

from dtrain.runtime import current_job, learning_rate, progress
from dtrain.runtime import tensorflow as distributed

keras = distributed.keras()
BASE_BATCH = 64
"""The global batch for which --lr is meant."""


class Data(NamedTuple):
    """Images as bytes of shape (samples, height, width, channels), and their classes."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits() -> Data:
    """1797 digits of 8 x 8 pixels, a fifth of them held out.

    From the UCI Machine Learning Repository: Alpaydin and Kaynak, Optical Recognition of
    Handwritten Digits, 1998 (CC BY 4.0).
    """
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = np.array([[float(cell) for cell in row] for row in csv.reader(file)], np.float32)
    # The file is sorted by writer.
    rows = np.random.default_rng(0).permutation(rows)
    images = (rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = rows[:, -1].astype(np.int32)
    cut = len(rows) * 4 // 5
    return Data(images[:cut], labels[:cut], images[cut:], labels[cut:])


def cifar(path: Path) -> Data:
    """CIFAR-10 (Krizhevsky, 2009): 50 000 images to train on, 10 000 held out."""
    batches = dict(cifar_batches(path))
    names = [f"data_batch_{number}" for number in range(1, 6)]
    if missing := [name for name in [*names, "test_batch"] if name not in batches]:
        raise SystemExit(f"{path} has no {missing[0]}: --data needs CIFAR-10's python version")

    def images(batch: Any) -> np.ndarray:
        return np.asarray(batch[b"data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

    def labels(batch: Any) -> np.ndarray:
        return np.asarray(batch[b"labels"], np.int32)

    return Data(
        np.concatenate([images(batches[name]) for name in names]),
        np.concatenate([labels(batches[name]) for name in names]),
        images(batches["test_batch"]),
        labels(batches["test_batch"]),
    )


def cifar_batches(path: Path) -> Iterator[tuple[str, Any]]:
    """Name and content of each file of CIFAR-10, in a folder or a .tar.gz."""
    if path.is_dir():
        folder = path / "cifar-10-batches-py" if (path / "cifar-10-batches-py").is_dir() else path
        for file in folder.glob("*_batch*"):
            yield file.name, pickle.loads(file.read_bytes(), encoding="bytes")  # noqa: S301 - that is how CIFAR-10 comes
    elif path.is_file():
        with tarfile.open(path) as archive:
            for member in archive:
                if content := archive.extractfile(member) if "_batch" in member.name else None:
                    yield Path(member.name).name, pickle.load(content, encoding="bytes")  # noqa: S301
    else:
        raise SystemExit(f"--data {path}: no such file or folder")


def make_layers(shape: tuple[int, ...], seed: int) -> list[Any]:
    """A small convolutional network. Seeds give every process the same initial weights."""
    width = 2 * shape[0]
    weights = keras.initializers.GlorotUniform(seed)
    convolution = {"kernel_initializer": weights, "padding": "same", "activation": "relu"}
    return [
        keras.layers.Conv2D(width, 3, **convolution),
        keras.layers.Conv2D(2 * width, 3, strides=2, **convolution),
        keras.layers.Conv2D(2 * width, 3, strides=2, **convolution),
        keras.layers.Flatten(),
        keras.layers.Dense(8 * width, activation="relu", kernel_initializer=weights),
        # Probabilities and losses need float32, whatever the other layers compute in.
        keras.layers.Dense(10, kernel_initializer=weights, dtype="float32"),
    ]


class Training:
    """State that both loops share: the model, its data, and the work after each step."""

    def __init__(
        self, arguments: argparse.Namespace, run: distributed.StrategyRun, data: Data
    ) -> None:
        self.arguments, self.run, self.data = arguments, run, data
        self.losses: dict[int, float] = {}
        shape = data.images.shape[1:]
        layers = make_layers(shape, arguments.seed)
        self.rate = learning_rate.scaled(arguments.lr, arguments.batch, BASE_BATCH)
        if run.name == "model_parallel":
            self.model = distributed.placed(layers, shape, run)
            self.optimizer = self.make_optimizer()
        else:
            with run.strategy.scope():
                self.model = keras.Sequential(layers)
                self.model.build((None, *shape))
                self.optimizer = self.make_optimizer()
        self.checkpoints = None
        self.done = 0
        if arguments.checkpoint:
            self.checkpoints = distributed.Checkpoints(
                arguments.checkpoint, run, model=self.model, optimizer=self.optimizer
            )

    def make_optimizer(self) -> Any:
        optimizer = distributed.with_loss_scaling(keras.optimizers.SGD(self.rate, momentum=0.9))
        # Its variables must exist before a checkpoint is restored.
        optimizer.build(self.model.trainable_variables)
        return optimizer

    def warm_up(self, done: int) -> None:
        """Set the learning rate for the step after ``done`` steps."""
        warmup = self.arguments.warmup
        self.optimizer.learning_rate = learning_rate.warmed_up(self.rate, done, warmup)

    def batches(self, batch: int | None = None) -> tf.data.Dataset:
        """Global training batches, starting with the first one not used yet."""
        samples = distributed.dataset(
            (self.data.images, self.data.labels),
            self.run,
            batch or self.arguments.batch,
            shuffle=len(self.data.labels),
            seed=self.arguments.seed,
            skip=self.done,
        )
        return samples.map(lambda images, labels: (scaled(images), labels))

    def report(self, step: int, loss: float) -> None:
        """Report a step and move on to the next."""
        self.losses[step] = loss
        self.warm_up(step)
        if self.run.is_chief and (step % self.arguments.every == 0 or step == 1):
            print(f"step {step}/{self.arguments.steps} loss {loss:.4f}", flush=True)

    def accuracy(self) -> float:
        """The share of held-out images that the model classifies correctly."""
        right = 0
        for start in range(0, len(self.data.test_labels), 500):
            part = slice(start, start + 500)
            scores = self.model(scaled(self.data.test_images[part]), training=False)
            right += int(np.sum(np.argmax(scores, axis=1) == self.data.test_labels[part]))
        return right / len(self.data.test_labels)


def scaled(images: Any) -> tf.Tensor:
    """Convert bytes to numbers from 0 to 1."""
    return tf.cast(images, tf.float32) / 255.0


def train_by_fit(training: Training) -> None:
    """Train with Keras's loop."""
    arguments, run = training.arguments, training.run
    with run.strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    training.model.compile(training.optimizer, loss)
    data: Any = training.batches()
    if run.asynchronous:
        # Each worker must create its own.
        data = keras.utils.experimental.DatasetCreator(
            lambda each: training.batches(each.get_per_replica_batch_size(arguments.batch))
        )
    callbacks = distributed.callbacks(
        run,
        total=arguments.steps,
        done=training.done,
        checkpoints=training.checkpoints,
        save_every=arguments.save_every,
        logdir=arguments.logdir,
        on_step=training.report,
    )
    steps = arguments.steps - training.done
    for first, last, length in distributed.epochs(run, steps, arguments.every):
        training.model.fit(
            data,
            initial_epoch=first,
            epochs=last,
            steps_per_epoch=length,
            shuffle=False,  # the dataset is shuffled
            verbose=0,
            callbacks=callbacks,
        )
        if training.model.stop_training:
            break


def train_by_hand(training: Training) -> None:
    """Train with a custom loop."""
    arguments, run = training.arguments, training.run
    model, optimizer = training.model, training.optimizer

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """One replica's part of a step: its share of the mean loss."""
        with tf.GradientTape() as tape:
            scores = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            # The mean over the global batch. This replica has only a part of it.
            loss = tf.reduce_sum(losses) / arguments.batch
            objective = distributed.scaled_loss(loss, optimizer)
        gradients = tape.gradient(objective, model.trainable_variables)
        gradients = distributed.sum_gradients(run, distributed.unscaled(gradients, optimizer))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    must_stop = distributed.stop_together(run)
    saved = training.done
    for last, losses in steps_of(training, step):
        for number, loss in enumerate(losses, start=last - len(losses) + 1):
            training.report(number, loss)
        if run.is_chief:
            progress(last, total=arguments.steps, loss=losses[-1])
        stop = must_stop()
        due = stop or last == arguments.steps or last - saved >= arguments.save_every
        if training.checkpoints and due:
            training.checkpoints.save(last)
            saved = last
        if stop:
            break


def steps_of(training: Training, step: Any) -> Iterator[tuple[int, list[float]]]:
    """Run the steps. Yields the last step's number, and the losses since the previous yield."""
    arguments, run = training.arguments, training.run
    if run.asynchronous:
        coordinator = distributed.Coordinator(run, training.batches, step)
        for first in range(training.done, arguments.steps, arguments.every):
            last = min(first + arguments.every, arguments.steps)
            yield last, coordinator.run(last - first)
        return
    take = distributed.replicated(run, step)
    batches = iter(run.strategy.experimental_distribute_dataset(training.batches()))
    for number in range(training.done + 1, arguments.steps + 1):
        yield number, [float(take(next(batches)))]


def evaluate(training: Training) -> None:
    """The evaluator's task: the accuracy of each checkpoint when it appears."""
    if training.checkpoints is None:
        raise SystemExit("an evaluator reads checkpoints: pass --checkpoint DIR")
    for step in training.checkpoints.follow():
        print(f"evaluator: step {step} held-out accuracy {training.accuracy():.3f}", flush=True)
        if step >= training.arguments.steps:
            return


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loop", choices=["fit", "custom"], default="fit")
    parser.add_argument("--data", type=Path, help="CIFAR-10: a folder or a .tar.gz")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=BASE_BATCH, help="images in a global batch")
    parser.add_argument("--lr", type=float, default=0.05, help=f"for a batch of {BASE_BATCH}")
    parser.add_argument("--warmup", type=int, default=20, help="steps to reach --lr in")
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
    training = Training(arguments, run, cifar(arguments.data) if arguments.data else digits())
    if run.is_evaluator:
        evaluate(training)
        return
    if arguments.logdir:
        distributed.tensorboard(arguments.logdir)
    if training.checkpoints:
        training.done = training.checkpoints.restore()
    if training.done < arguments.steps:
        training.warm_up(training.done)
        (train_by_fit if arguments.loop == "fit" else train_by_hand)(training)
    if run.is_chief:
        if arguments.losses:
            arguments.losses.write_text(json.dumps(training.losses))
        print(f"held-out accuracy {training.accuracy():.3f}", flush=True)
    distributed.meet(run)


if __name__ == "__main__":
    main()
