"""Cluster files of tests."""

from __future__ import annotations

from pathlib import Path

from dtrain.loading import load
from dtrain.spec.model import ClusterFile


def read(path: Path) -> ClusterFile:
    """The file as a launch gets it. Raises SpecError and UsageError."""
    return load(path).spec()
