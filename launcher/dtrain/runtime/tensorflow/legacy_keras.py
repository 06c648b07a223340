"""Chooses the Keras version for a strategy.

Under several workers and parameter servers, Keras 3's ``fit`` fails. Under central storage, it
reports a wrong loss. Under single-host strategies it is correct, but it draws one batch more than
it trains on (the first), so a resumed run sees different data. tf-keras (Keras 2) has none of these
problems. Custom loops work with both.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any, NoReturn

from dtrain.runtime.job import current_job
from dtrain.runtime.tensorflow.cluster import TfConfig, current_cluster
from dtrain.runtime.tensorflow.strategies import strategy_name

_NEED_LEGACY = frozenset({"multi_worker_mirrored", "parameter_server", "central_storage"})
_NO_STRATEGY = frozenset({"none", "model_parallel"})


def keras() -> ModuleType:
    """The Keras for this job's model: tf-keras under a ``tf.distribute`` strategy, else Keras 3.
    ``TF_USE_LEGACY_KERAS`` overrides it: 1 for tf-keras, 0 for Keras 3.

    If tf-keras is not installed, it is Keras 3, for custom loops. `init` then makes its ``fit``
    raise if the result would be wrong.
    """
    if _legacy_wanted():
        # TensorFlow's own uses of Keras must get the same version.
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
        return importlib.import_module("tf_keras")
    return importlib.import_module("keras")


def is_legacy(module: ModuleType) -> bool:
    """Whether ``module`` is tf-keras."""
    return module.__name__.startswith("tf_keras")


def refuse_fit(strategy: str, cluster: TfConfig) -> None:
    """Make a ``fit`` that would go wrong raise an error that names the alternatives."""
    if strategy == "model_parallel" and cluster.tasks:
        _refuse(
            keras(),
            "fit() does not sum the gradients of several workers whose layers were placed by"
            " hand: write your own training loop (`distributed.replicated`)",
        )
    elif strategy in _NEED_LEGACY and cluster.role != "evaluator":
        trouble = (
            "reports a wrong loss" if strategy == "central_storage" else "fails on its first batch"
        )
        _refuse(
            importlib.import_module("keras"),
            f"Keras 3's fit() {trouble} under {strategy}. Build the model with tf-keras"
            " (`pip install tf-keras`, then `keras = distributed.keras()`, or"
            " TF_USE_LEGACY_KERAS=1 in job.env), or write your own training loop",
        )


def _refuse(module: ModuleType, reason: str) -> None:
    def fit(*_arguments: Any, **_options: Any) -> NoReturn:
        raise RuntimeError(reason)

    module.Model.fit = fit


def _legacy_wanted() -> bool:
    if asked := os.environ.get("TF_USE_LEGACY_KERAS"):
        return asked in ("1", "true", "True")
    name = strategy_name(current_job().strategy, current_cluster())
    return name not in _NO_STRATEGY and importlib.util.find_spec("tf_keras") is not None
