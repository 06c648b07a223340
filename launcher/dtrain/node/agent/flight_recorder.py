"""Requests and reads the dumps of torch's flight recorder, which records collectives."""

from __future__ import annotations

import contextlib
import json
import os
import threading

from dtrain.node.agent.isolation import in_child
from dtrain.node.agent.kernel_log import MAX_LINE
from dtrain.node.agent.wire import encode
from dtrain.node.agent.worker_files import read_regular
from dtrain.node.files import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from dtrain.node.agent.wire import Json

DUMP_LIMIT = 20.0
"""Seconds for torch to write a dump. It checks for requests once a second, and symbolizes stacks
slowly on a busy machine."""
MAX_DUMP = 64 << 20
MAX_RANK_DIGITS = 6
READ_LIMIT, READ_MEMORY = 10.0, 1 << 29
"""Seconds and bytes of memory for reading one dump."""
LATEST = 8
"""Collectives that are reported of each process group."""
MAX_GROUPS, MAX_TENSORS, MAX_FRAMES = 64, 8, 40
MAX_REPORTED = 256 << 10
"""Bytes that are reported of one rank."""
FILES = (b"TORCH_FR_DUMP_TEMP_FILE", b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the prefix of the dump files: of torch 2.13, and of older versions."""
PIPES = b"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


def unpickled(data: bytes) -> Any:
    """The plain data in a pickle. A pickle that names a function or class is refused, so nothing
    in it is called."""
    import io
    import pickle  # rarely needed and slow to import

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError("%s.%s is not plain data" % (module, name))

    return PlainUnpickler(io.BytesIO(data)).load()


class FlightRecorders:
    """The flight recorders of all ranks of this host, configured by ``environment``.

    Any process of the job can write a dump for any rank.
    """

    def __init__(self, environment: dict[bytes, bytes], workdir: bytes, world_size: int) -> None:
        self._world_size = world_size
        prefix = next((environment[name] for name in FILES if environment.get(name)), b"")
        self._files = os.path.join(workdir, prefix) if prefix else b""
        pipes = environment.get(PIPES)
        self._pipes = os.path.join(workdir, pipes) if pipes else b""
        self._lock = threading.Lock()
        # If the user has chosen the folder, it may hold dumps of an earlier run.
        self._seen = {rank: mark_of(path) for rank, path in self._dumps()}

    def request_dump(self, rank: int | None) -> bool:
        """Have a rank write its dump. False if no process of the rank reads requests."""
        if rank is None or not self._pipes:
            return False
        try:
            fd = os.open(b"%s%d.pipe" % (self._pipes, rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        with contextlib.suppress(OSError):  # an earlier request is still pending
            os.write(fd, b"1")
        os.close(fd)
        return True

    def new_dumps(self) -> list[tuple[int, list[Json]]]:
        """The ranks that have written a dump since the last call, and the groups in it."""
        found = []
        with self._lock:
            for rank, path in self._dumps():
                groups = self._read(rank, path)
                if groups is not None:
                    found.append((rank, groups))
        return found

    def _dumps(self) -> Iterator[tuple[int, bytes]]:
        """The rank and path of each dump file."""
        folder, name = os.path.split(self._files)
        for file in listed(folder) if self._files else []:
            rank = file[len(name) :]
            numbered = file.startswith(name) and rank.isdigit() and len(rank) <= MAX_RANK_DIGITS
            if numbered and int(rank) < self._world_size:
                yield int(rank), os.path.join(folder, file)

    def _read(self, rank: int, path: bytes) -> list[Json] | None:
        mark = mark_of(path)
        if mark is None or mark == self._seen.get(rank) or mark[1] > MAX_DUMP:
            return None
        # A hostile pickle can allocate any amount of memory.
        dump = in_child(lambda: groups_in(path), READ_LIMIT, READ_MEMORY, 2 * MAX_REPORTED)
        self._seen[rank] = mark
        return dump["groups"] if dump is not None else None


def groups_in(path: bytes) -> Json:
    """The groups in a dump. Raises an exception for a partial dump or another format."""
    return {"groups": groups_of(unpickled(read_regular(path, MAX_DUMP) or b""))}


def mark_of(path: bytes) -> tuple[int, int] | None:
    """Changes when the file is written again. None if there is no such file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def groups_of(dump: Json) -> list[Json]:
    """The last collectives in each process group of a flight recorder's dump.

    Raises an exception for anything else.
    """
    entries: dict[str, list[Json]] = {}
    for entry in dump["entries"]:
        if not entry["is_p2p"]:
            entries.setdefault(words(entry["process_group"][0]), []).append(entry)
    groups = []
    for name, calls in list(entries.items())[:MAX_GROUPS]:
        ranks = json.loads(dump["pg_config"].get(name, {}).get("ranks", "[]"))
        groups.append(
            {
                "id": name,
                "name": words(calls[-1]["process_group"][1]),
                "ranks": [rank for rank in map(int, ranks) if 0 <= rank < 10**MAX_RANK_DIGITS],
                "calls": [call_of(entry, entry is calls[-1]) for entry in calls[-LATEST:]],
            }
        )
    return fitting(groups)


def fitting(groups: list[Json]) -> list[Json]:
    """As much of ``groups`` as fits into `MAX_REPORTED` bytes. Drops frames first, then the ranks
    of the groups, then whole groups."""
    if len(encode({"groups": groups})) > MAX_REPORTED:
        for group in groups:
            for call in group["calls"]:
                call["frames"] = []
    if len(encode({"groups": groups})) > MAX_REPORTED:
        for group in groups:
            group["ranks"] = []
    fitted: list[Json] = []
    left = MAX_REPORTED
    for group in groups:
        left -= len(encode(group)) + 1
        if left < 0:
            break
        fitted.append(group)
    return fitted


def call_of(entry: Json, last: bool) -> Json:
    state, op = entry["state"], words(entry["profiling_name"])
    tensors = list(zip(entry["input_dtypes"], entry["input_sizes"]))[:MAX_TENSORS]
    frames = list(entry.get("frames", ()))[:MAX_FRAMES] if last else []
    return {
        "seq": int(entry["collective_seq_id"]),
        "op": op,
        "tensors": [[words(kind), [int(size) for size in sizes]] for kind, sizes in tensors],
        # gloo does not record the state; NCCL also retires collectives that timed out.
        "done": state == "completed" or bool(entry["retired"] and op.startswith("gloo:")),
        "frames": [
            [words(frame["name"]), words(frame["filename"]), int(frame["line"])] for frame in frames
        ],
    }


def words(value: Any) -> str:
    """A name in a dump, cut to `MAX_LINE` characters. Raises TypeError for anything but text and
    numbers: the text of nested lists may be endless."""
    if not isinstance(value, (str, int)):
        raise TypeError("not a name")
    return str(value)[:MAX_LINE]
