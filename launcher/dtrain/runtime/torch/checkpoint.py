"""Sharded checkpoints that load in another layout and survive a kill during a save.

A checkpoint is a folder ``step-00000100``, written by all ranks with torch.distributed.checkpoint.
Until it is complete, it is called ``step-00000100.partial``; the rename is the last step. Tensors
are stored whole, under their names in the whole model, so ranks of another layout read only what
they hold. All hosts must share the folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write

from dtrain.runtime.progress import phase
from dtrain.runtime.torch.batches import Batches
from dtrain.runtime.torch.model import ParallelModel

_COMPLETE = re.compile(r"step-(\d+)")
_SCALARS = "training.json"


@dataclass(frozen=True, slots=True)
class _State:
    model: ParallelModel
    optimizer: torch.optim.Optimizer

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return {
            f"model.{name}": tensor
            for part in self.model.parts
            for name, tensor in part.state_dict().items()
        }

    def moments(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The optimizer's state for each parameter, by the parameter's name."""
        for name, parameter in self.model.named_parameters():
            yield f"optimizer.{name}", self.optimizer.state[parameter]


@phase("save")
def save(
    folder: str | Path,
    step: int,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batches: Batches | None = None,
    *,
    keep: int = 2,
) -> None:
    """Write the state that a run needs to continue after ``step``. Keep the newest ``keep``.

    All ranks call it. It stores weights, the optimizer's state for each parameter, the position in
    the data and the loss scale. The script sets the optimizer's settings (learning rate, ...).
    Raises ValueError if ``keep`` is less than 1, and RuntimeError if the hosts do not share
    ``folder``.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1 checkpoint must stay")
    folder = Path(folder)
    partial = folder / f"step-{step:08}.partial"
    if dist.get_rank() == 0:
        # Left over from a killed attempt.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        scalars = {
            "step": step,
            "batches": batches.state_dict() if batches is not None else None,
            "loss_scale": model.loss_scale.state_dict(),
        }
        (partial / _SCALARS).write_text(json.dumps(scalars), encoding="utf-8")
    _wait()
    _refuse_separate_folders(partial)
    state = _State(model, optimizer)
    tensors: dict[str, Any] = dict(state.weights())
    for name, kept in state.moments():
        tensors |= {f"{name}.{key}": value for key, value in kept.items()}
    write(tensors, storage_writer=FileSystemWriter(partial))
    _wait()
    if dist.get_rank() == 0:
        complete = partial.with_suffix("")
        shutil.rmtree(complete, ignore_errors=True)
        partial.rename(complete)
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)
    _wait()


@phase("load")
def restore(
    folder: str | Path,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batches: Batches | None = None,
) -> int:
    """Load the newest complete checkpoint, from any layout. Returns its step, or 0 if there is
    none. All ranks call it, before the first step."""
    found = latest(folder)
    if found is None:
        return 0
    state = _State(model, optimizer)
    reader = FileSystemReader(found)
    saved = reader.read_metadata().state_dict_metadata
    weights = state.weights()
    tensors: dict[str, Any] = dict(weights)
    moments: dict[str, dict[str, Any]] = {}
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for (name, kept), parameter in zip(state.moments(), model.parameters(), strict=True):
        prefix = f"{name}."
        moments[name] = {
            key[len(prefix) :]: _place_for(key[len(prefix) :], entry, parameter, groups[parameter])
            for key, entry in saved.items()
            if key.startswith(prefix) and "." not in key[len(prefix) :]
        }
        tensors |= {f"{prefix}{key}": value for key, value in moments[name].items()}
        kept.update(moments[name])
    load(tensors, storage_reader=reader)
    scalars = json.loads((found / _SCALARS).read_text(encoding="utf-8"))
    model.loss_scale.load_state_dict(scalars["loss_scale"])
    if batches is not None and scalars["batches"] is not None:
        batches.load_state_dict(scalars["batches"])
    return int(scalars["step"])


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, as the first rank sees it."""
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:
        found = [next(reversed(_complete(Path(folder))), None)]
    dist.broadcast_object_list(found, device=torch.device("cpu"))
    return found[0]


def _complete(folder: Path) -> list[Path]:
    """Oldest first."""
    if not folder.is_dir():
        return []
    steps = {
        int(name[1]): path for path in folder.iterdir() if (name := _COMPLETE.fullmatch(path.name))
    }
    return [steps[step] for step in sorted(steps)]


def _place_for(key: str, entry: Any, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Memory for an optimizer tensor: split like its parameter if it has the parameter's size."""
    counted_on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
    if entry.size == parameter.shape and key != "step":
        return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    # Same placement as torch's load_state_dict: an optimizer counts steps on the CPU, unless it
    # runs entirely on the GPU.
    device = torch.device("cpu") if counted_on_cpu else parameter.device
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _refuse_separate_folders(partial: Path) -> None:
    """Raise RuntimeError if hosts use separate disks: their parts would form no checkpoint."""
    seen = torch.tensor(int((partial / _SCALARS).is_file()), device="cpu")
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    if not seen:
        raise RuntimeError(
            f"not every host sees {partial}, which the first rank created: put checkpoints in a"
            " folder on a file system that all hosts share"
        )


def _wait() -> None:
    # On the CPU: NCCL's barrier would occupy a GPU during a disk write.
    dist.all_reduce(torch.zeros(1, device="cpu"))
