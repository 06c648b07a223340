"""Sharded checkpoints that load in another layout and survive a kill during a save.

A checkpoint is a folder ``step-00000100``, written by all ranks with torch.distributed.checkpoint.
Until it is complete, it is called ``step-00000100.partial``; the rename is the last step. Tensors
are stored whole, under their names in the whole model, so ranks of another layout read only what
they hold. All hosts must share the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write

from dtrain.runtime.progress import phase
from dtrain.runtime.torch.agreement import agreed
from dtrain.runtime.torch.batches import Batches
from dtrain.runtime.torch.model import ParallelModel
from dtrain.runtime.torch.plain_data import PlainPlanner, PlainReader

_COMPLETE = re.compile(r"step-(\d+)")
_SCALARS = "training.json"


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

    All ranks call it. It stores weights, the optimizer's state for each parameter, the loss scale,
    and the position in the data and in the random numbers. The script sets the optimizer's settings
    (learning rate, ...). Raises ValueError if ``keep`` is less than 1, and RuntimeError if the
    hosts do not share ``folder``.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1 checkpoint must stay")
    folder = Path(folder)
    partial = folder / f"step-{step:08}.partial"
    if dist.get_rank() == 0:
        # Left over from killed attempts, which may have stopped at other steps.
        for left in folder.glob("step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        scalars = {
            "step": step,
            "batches": batches.state_dict() if batches is not None else None,
            "loss_scale": model.loss_scale.state_dict(),
            "draws": model.draws.step,
        }
        with (partial / _SCALARS).open("w", encoding="utf-8") as file:
            json.dump(scalars, file)
            file.flush()
            os.fsync(file.fileno())  # as torch does with the other files
    _wait()
    _refuse_separate_folders(partial)
    values: dict[str, Any] = dict(_weights(model))
    for name, parameter in model.named_parameters():
        # Not `state[parameter]`, which would add the parameters that the optimizer does not have.
        kept = optimizer.state.get(parameter, {})
        values |= {f"optimizer.{name}.{key}": value for key, value in kept.items()}
    write(values, storage_writer=FileSystemWriter(partial))
    _wait()
    if dist.get_rank() == 0:
        complete = partial.with_suffix("")
        shutil.rmtree(complete, ignore_errors=True)
        partial.rename(complete)
        # Those of later steps are not older: `restore` could not read them, or was not called.
        for old in [path for at, path in _complete(folder).items() if at <= step][:-keep]:
            shutil.rmtree(old)
    _wait()


@phase("load")
def restore(
    folder: str | Path,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batches: Batches | None = None,
) -> int:
    """Load the newest checkpoint that can be read, from any layout. Returns its step, or 0 if there
    is no checkpoint. All ranks call it, before the first step.

    If checkpoints exist, but none can be read, raises the error of the newest. Runs no code that
    is in a checkpoint.
    """
    newest: BaseException | None = None
    for found in _newest_first(Path(folder)):
        try:
            scalars = _load(found, model, optimizer)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - raised if all fail
            # It fails on all ranks or on none.
            newest = newest or error
            if dist.get_rank() == 0:
                reason = str(error).strip().rpartition("\n")[2]
                sys.stderr.write(f"warning: {found} cannot be read: {reason}\n")
            continue
        model.loss_scale.load_state_dict(scalars["loss_scale"])
        # Checkpoints of dtrain 0.1 do not have it.
        model.draws.begin(scalars.get("draws", scalars["step"]))
        if batches is not None and scalars["batches"] is not None:
            batches.load_state_dict(scalars["batches"])
        return int(scalars["step"])
    if newest is not None:
        raise newest
    return 0


def _load(found: Path, model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load the tensors of a checkpoint, and return its other values. If it fails on any rank, it
    fails on all."""
    moments: dict[str, dict[str, Any]] = {}
    with agreed():
        reader = PlainReader(found)
        saved = reader.read_metadata().state_dict_metadata
        scalars: dict[str, Any] = json.loads((found / _SCALARS).read_text(encoding="utf-8"))
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        trained = {n: p for n, p in model.named_parameters() if p in groups}
        for name, parameter in trained.items():
            prefix = f"optimizer.{name}."
            moments[name] = {
                key: _place_for(key, entry, parameter, groups[parameter])
                for full, entry in saved.items()
                if full.startswith(prefix) and "." not in (key := full[len(prefix) :])
            }
        values: dict[str, Any] = dict(_weights(model))
        for name, kept in moments.items():
            values |= {f"optimizer.{name}.{key}": value for key, value in kept.items()}
    load(values, storage_reader=reader, planner=PlainPlanner())
    for name, kept in moments.items():
        if kept:
            # Numbers are in ``values`` only.
            optimizer.state[trained[name]].update(
                {key: values[f"optimizer.{name}.{key}"] for key in kept}
            )
    return scalars


def _weights(model: ParallelModel) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {
        f"model.{name}": tensor
        for part in model.parts
        for name, tensor in part.state_dict().items()
    }


def _newest_first(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, as the first rank sees them."""
    found: list[list[Path] | None] = [None]
    if dist.get_rank() == 0:
        found = [[*_complete(folder).values()][::-1]]
    dist.broadcast_object_list(found, device=torch.device("cpu"))
    return found[0] or []


def _complete(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step, oldest first."""
    if not folder.is_dir():
        return {}
    steps = {
        int(name[1]): path for path in folder.iterdir() if (name := _COMPLETE.fullmatch(path.name))
    }
    return dict(sorted(steps.items()))


def _place_for(key: str, entry: Any, parameter: Tensor, group: dict[str, Any]) -> Tensor | None:
    """Memory for an optimizer tensor: split like its parameter if it has the parameter's size.
    None for a value that is not a tensor."""
    if isinstance(entry, BytesStorageMetadata):
        return None
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
