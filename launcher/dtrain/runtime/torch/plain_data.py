"""Reads checkpoints as data. torch unpickles them, and a pickle may call any function: a user who
can write to a folder of checkpoints could run code in the job.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

_METADATA = {
    *((kind.__module__, kind.__name__) for kind in (
        kinds.Metadata, kinds.MetadataIndex, kinds.StorageMeta, kinds.TensorProperties,
        kinds.TensorStorageMetadata, kinds.BytesStorageMetadata, kinds.ChunkStorageMetadata,
        kinds._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size,
    )),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}  # fmt: skip
"""All that the metadata of a checkpoint names, beside the types of its numbers."""


def _memory_format(_: Any, name: str) -> kinds._MEM_FORMAT_ENCODING:
    """In place of `getattr`, by which Python 3.11.2 and others pickle the member of an Enum."""
    return kinds._MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        of_numbers = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _METADATA or of_numbers:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")


class PlainReader(FileSystemReader):
    """Reads metadata without running code. Raises UnpicklingError if it names anything else than
    `_METADATA`."""

    def read_metadata(self, *_: Any, **__: Any) -> kinds.Metadata:
        data = Path(self.path, ".metadata").read_bytes()
        metadata: kinds.Metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        metadata.storage_meta = metadata.storage_meta or kinds.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Raises UnpicklingError for a value that `torch.load` with ``weights_only`` refuses. torch
    itself reads tensors so, but not other values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise pickle.UnpicklingError(
                f"{read_item.dest_index.fqn} is not plain data; if you trust the checkpoint, give"
                " the class of the value to torch.serialization.add_safe_globals"
            ) from None
        value.seek(0)
        super().load_bytes(read_item, value)
