"""The entry point of a training script: its rank, its device and the mesh of its layout."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

# The functions of this module keep the process group that exists when it is loaded. By default,
# torch loads it at the first use of DistributedDataParallel. Loaded before there is a group,
# nothing outlives destroy_process_group. Otherwise gloo's threads do, and a thread that frees the
# last tensor while Python exits aborts the process ("terminate called without an active
# exception").
import torch.distributed.nn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtrain.runtime.job import current_job
from dtrain.runtime.layout import Layout, Training
from dtrain.runtime.progress import steps
from dtrain.runtime.stopping import catch_sigterm, stop_requested
from dtrain.runtime.torch.batches import Batches, Dataset
from dtrain.runtime.torch.context import SequenceShare
from dtrain.runtime.torch.cores import own_cores
from dtrain.runtime.torch.experts import ExpertSplit, mesh_sizes_of_experts
from dtrain.runtime.torch.model import ParallelModel
from dtrain.runtime.torch.parallelize import Place, parallelize
from dtrain.runtime.torch.passes import Loss, TargetCount
from dtrain.runtime.torch.precision import use_tensor_cores
from dtrain.runtime.torch.resolve import StartedRanks, over, resolve
from dtrain.runtime.torch.same_data import refuse_different_data
from dtrain.runtime.torch.sharding import mesh_sizes
from dtrain.runtime.torch.weights import Initializer

SETTLE = 0.1
"""Seconds for gloo's threads to free the tensors of the last collective. Groups of sharded models
outlive destroy_process_group (torch 2.13), so their threads could do it while Python exits."""


class ParallelRun:
    """One rank's view of a training run. Use it in a ``with`` statement, or call `close`."""

    def __init__(
        self, strategy: str, layout: Layout, training: Training, device: torch.device, *, owns: bool
    ) -> None:
        self.strategy = strategy
        self.layout = layout
        self.training = training
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # DataParallel's copies are all in this one process.
        copies, parts = (1, 1) if strategy == "data_parallel" else mesh_sizes(layout)
        self.mesh = _mesh(layout, device, replicate=copies, shard=parts)
        """Dimensions ``pipeline``, ``replicate``, ``shard`` and ``tensor``, outermost first, as in
        Megatron-LM and torchtitan: tensor ranks communicate most, so they are neighbors on a
        host."""
        replicate, shard = self.mesh["replicate"], self.mesh["shard"]
        # The rank among those that hold the same part of the model.
        copy = replicate.get_local_rank() * shard.size() + shard.get_local_rank()
        self.data_size = replicate.size() * shard.size() // layout.context
        """Number of ranks that see different samples."""
        self.data_rank = copy // layout.context
        self._share = self._experts = None
        if layout.context > 1:
            mesh = _mesh(layout, device, data=layout.data, context=layout.context)
            self._share = SequenceShare(mesh["context"])
        if layout.expert > 1:
            copies, parts = mesh_sizes_of_experts(layout)
            mesh = _mesh(layout, device, replicate=copies, shard=parts, expert=layout.expert)
            self._experts = ExpertSplit(mesh)
        self._owns = owns
        self._catches = False

    @property
    def is_first(self) -> bool:
        """Whether this rank prints."""
        return self.rank == 0

    @property
    def precision(self) -> str:
        """``fp32``, ``tf32``, ``bf16`` or ``fp16``."""
        return self.training.precision or "fp32"

    @property
    def global_batch(self) -> int:
        """Samples in one optimizer step, over all ranks."""
        return self.layout.global_batch

    def parallelize(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        count: TargetCount | None = None,
        init: Initializer | None = None,
        seed: int = 0,
        blocks: str | None = None,
        column: Iterable[str] = (),
        row: Iterable[str] = (),
    ) -> ParallelModel:
        """Apply this run's layout and precision to ``model``.

        The model must be a plain transformer: an embedding, a ModuleList of blocks, a norm and an
        output layer. Each block takes the output of the previous block as its first argument. A
        model built under ``torch.device("meta")`` never exists as a whole: each module is
        initialized by its ``reset_parameters()`` and then by ``init(name, module)``, with random
        numbers that depend only on ``seed`` and its name. Existing weights are kept.

        ``loss`` takes the model's output in float32 and the targets, and returns the mean over a
        micro-batch. If micro-batches differ in the number of targets that matter, as with padding,
        it returns the sum over them, and ``count`` their number, both for given targets: only then
        is the result the mean over the global batch in every layout.

        ``blocks`` names the list of blocks if there are several lists. ``column`` and ``row`` name
        the Linear modules that open and close a layer, for tensor parallelism.

        Under tensor parallelism, each kind of block is first tested with random weights, in float32
        and with only the residual stream as input: its shares must add up to the whole. ``loss`` is
        tested too: if it is correct for split logits (DTensor), like `F.cross_entropy`, no rank
        holds logits of the whole vocabulary. Otherwise the logits are gathered.

        Under context parallelism, ``loss`` gets the rank's share of each sequence, and must be a
        mean or sum over tokens. Blocks must take positions from `positions` and attention from
        `F.scaled_dot_product_attention`; each kind of block is tested.

        Expert parallelism spreads the experts of every `MixtureOfExperts`.

        Raises ValueError, on every rank, for a model that the layout cannot split.
        """
        place = Place(
            self.strategy,
            self.layout,
            self.precision,
            self.mesh,
            self.device,
            self._share,
            self._experts,
        )
        return parallelize(
            model,
            place,
            loss=loss,
            count=count,
            init=init,
            seed=seed,
            blocks=blocks,
            column=column,
            row=row,
        )

    def batches(
        self, dataset: Dataset, *, seed: int = 0, epochs: int | None = None, workers: int = 0
    ) -> Batches:
        """Global batches of ``dataset``, divided among the data ranks; see `Batches`.

        All ranks call it and read the first and the last sample to compare them. Raises ValueError
        if they differ or do not fill a global batch.
        """
        refuse_different_data(dataset, workers)
        return Batches(
            dataset,
            self.global_batch,
            self.data_rank,
            self.data_size,
            self.device,
            seed=seed,
            epochs=epochs,
            workers=workers,
        )

    def should_stop(self) -> bool:
        """Whether any rank has received SIGTERM; all ranks get the same answer. Call it on all
        ranks, between two steps. After the first call, SIGTERM has no other effect."""
        if not self._catches:
            # Not in `init`: a script that never calls this must still end on SIGTERM.
            catch_sigterm()
            self._catches = True
        # On the CPU, so that it does not wait for a GPU's step.
        asked = torch.tensor(int(stop_requested()), device="cpu")
        with steps.waiting():
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    def print(self, *values: Any) -> None:
        """Print on the first rank only, at once."""
        if self.is_first:
            print(*values, flush=True)  # noqa: T201 - printing is its purpose

    def close(self) -> None:
        """Leave the process group, if `init` created it."""
        if self._owns and dist.is_initialized():
            if self.device.type == "cpu":
                time.sleep(SETTLE)
            dist.destroy_process_group()
        self._owns = False

    def __enter__(self) -> ParallelRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # Destroying NCCL's group waits for pending operations. Other ranks may never join them, and
        # then the error would never be shown (pytorch/torchtitan issue 1342).
        if kind is None or self.device.type != "cuda":
            self.close()


def init(
    strategy: str | None = None,
    layout: Layout | None = None,
    training: Training | None = None,
    *,
    device: str | None = None,
) -> ParallelRun:
    """Join the other ranks. Call it once, before the model is built.

    Strategy, layout and training come from the cluster file. The arguments are defaults for what
    the file does not set, and for scripts that torchrun or a shell started. Without either, every
    rank gets a copy of the model (ddp).

    Raises ValueError for a layout that does not fit the ranks or cannot be trained.
    """
    job = current_job()
    name = job.strategy or strategy or ("3d" if job.layout or layout else "ddp")
    chosen = over(training or Training(), job.training)
    where = _device(device)
    world = StartedRanks(
        int(os.environ.get("WORLD_SIZE", "1")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max(1, torch.cuda.device_count()) if where.type == "cuda" else 1,
    )
    # A launch also sets the global batch if the file sets only grad_accumulation.
    own_batch = job.layout is not None and job.training.global_batch is None
    resolved = resolve(name, job.layout or layout, chosen, world, own_batch=own_batch)
    use_tensor_cores(chosen.precision)
    owns = not dist.is_initialized()
    if owns:
        _join(where)
    if resolved.offload or where.type == "cpu":
        cores, given = own_cores(), os.environ.get("OMP_NUM_THREADS")
        # The host's cores update offloaded states. 1 is what torchrun and dtrain set by default.
        if given is None or (given == "1" and resolved.offload):
            torch.set_num_threads(cores)
    return ParallelRun(name, resolved, chosen, where, owns=owns)


def _device(name: str | None) -> torch.device:
    """This rank's GPU, or the CPU if there is no GPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count() if name in (None, "cuda") else 0
    if gpus:
        # If each rank sees one GPU (srun --gpus-per-task=1), that GPU is the rank's own.
        index = local_rank if gpus > 1 else 0
        if index >= gpus:
            raise ValueError(
                f"local rank {local_rank} has no GPU of its own: this host shows {gpus}; start one"
                ' process for each, or init(device="cpu")'
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if name == "cuda" or (name is None and re.match(r"\d|GPU-|MIG-", named)):
        asked = "init(device='cuda')" if name else f"CUDA_VISIBLE_DEVICES is {named!r}"
        how = (
            f"torch {torch.__version__} is built without CUDA; install a build with it"
            if torch.version.cuda is None and torch.version.hip is None
            else "check that nvidia-smi lists them and that the driver is new enough for torch"
            f" {torch.__version__}"
        )
        raise ValueError(
            f"{asked}, but this process sees no GPU: {how}; or train on the CPU, by"
            ' init(device="cpu")'
        )
    return torch.device("cpu")


def _join(device: torch.device) -> None:
    # gloo next to NCCL: offloaded states, checkpoints and small agreements are on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _mesh(layout: Layout, device: torch.device, **between: int) -> DeviceMesh:
    """All ranks by pipeline stage, by the dimensions ``between`` and by tensor rank. Ranks that
    differ only in the last dimensions are neighbors."""
    sizes = {"pipeline": layout.pipeline, **between, "tensor": layout.tensor}
    return init_device_mesh(device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
