"""Starts distributed training: from the environment to a strategy."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from dtrain.runtime.job import current_job
from dtrain.runtime.stopping import catch_sigterm
from dtrain.runtime.tensorflow.cluster import TfConfig, connect_directly, current_cluster
from dtrain.runtime.tensorflow.deadline import start_deadline
from dtrain.runtime.tensorflow.legacy_keras import refuse_fit
from dtrain.runtime.tensorflow.strategies import ONE_HOST, build_strategy, strategy_name


@dataclass(frozen=True, slots=True)
class StrategyRun:
    """A training run that `init` has set up."""

    name: str
    """The strategy's name in ``job.strategy``."""
    strategy: tf.distribute.Strategy
    cluster: TfConfig

    @property
    def is_chief(self) -> bool:
        """Whether this process reports and keeps the checkpoints."""
        return self.cluster.is_chief

    @property
    def is_evaluator(self) -> bool:
        """Whether this process only evaluates checkpoints and does not train."""
        return self.cluster.role == "evaluator"

    @property
    def asynchronous(self) -> bool:
        """Whether workers step without waiting for each other: true under parameter servers."""
        return self.name == "parameter_server" and not self.is_evaluator

    @property
    def several_workers(self) -> bool:
        """Whether several processes take each step together."""
        return bool(self.cluster.tasks) and not self.asynchronous and not self.is_evaluator

    @property
    def replicas(self) -> int:
        """Copies of the model that share one global batch."""
        return int(self.strategy.num_replicas_in_sync)

    def __str__(self) -> str:
        if self.is_evaluator:
            return f"{self.cluster.name} evaluates the checkpoints"
        task = f"{self.cluster.name}: " if self.cluster.tasks else ""
        workers = len(self.cluster.tasks.get("worker", ()))
        share = f"{workers} worker(s)" if self.asynchronous else f"{self.replicas} replica(s)"
        return f"{task}strategy {self.name}, {share}"


def init(strategy: str | None = None) -> StrategyRun:
    """Build ``strategy``, or the job's strategy, and handle SIGTERM for `stop_requested`.

    Without a name, ``TF_CONFIG`` selects parameter servers or several mirrored workers; a single
    process gets a strategy for this host's GPUs. Call it after `configure_devices` and before any
    operation.

    Raises ValueError if the strategy is unknown or does not fit the cluster, RuntimeError if there
    is no TPU. Ends the process if peers do not appear (`start_deadline`).
    """
    cluster = current_cluster()
    name = strategy_name(strategy or current_job().strategy, cluster)
    connect_directly(cluster)
    alone = cluster.role == "evaluator" or name == "none" or name in ONE_HOST
    with start_deadline(TfConfig() if alone else cluster):
        built = build_strategy(name, cluster)
    # A multi-worker strategy has installed its own handler, which swallows TERM.
    catch_sigterm()
    refuse_fit(name, cluster)
    return StrategyRun(name, built, cluster)
