"""The agent reads the dumps of torch's flight recorder."""

from __future__ import annotations

import functools
import os
import pickle
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from dtrain.launchplan.environment import host_variables
from dtrain.node.agent import flight_recorder
from dtrain.node.agent.environment import NodeVariables
from dtrain.node.agent.flight_recorder import (
    FILES,
    MAX_REPORTED,
    PIPES,
    FlightRecorders,
)
from dtrain.node.agent.wire import encode
from dtrain.spec.model import Job, Watchdog
from support.limits import HANG
from support.node import written


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to read a dump than a node has time for."""
    monkeypatch.setattr(flight_recorder, "READ_LIMIT", HANG)


ENTRY = {
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 7,
    "p2p_seq_id": 0,
    "is_p2p": False,
    "profiling_name": "nccl:all_reduce",
    "input_sizes": [[4, 3]],
    "input_dtypes": ["Float"],
    "state": "started",
    "retired": False,
    "frames": [{"name": "step", "filename": "train.py", "line": 40}],
}


def dump(**entry: Any) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "entries": [ENTRY | entry], "pg_config": config}


def recorded(folder: Path, **setup: str) -> dict[bytes, bytes]:
    """The flight recorder's variables in a watched job's environment."""
    environment = {name.encode(): value.encode() for name, value in setup.items()}
    variables = host_variables(Job("torch", watchdog=Watchdog(silence=60)), {}, None)
    node = NodeVariables(os.fsencode(folder), os.fsencode(folder))
    node.complete(environment, written(variables))
    return {name: value for name, value in environment.items() if name.startswith(b"TORCH_")}


def recorders(folder: Path) -> FlightRecorders:
    environment = recorded(folder)
    return FlightRecorders(environment, os.fsencode(folder), 8)


def test_each_dump_is_reported_once(tmp_path: Path) -> None:
    flights = recorders(tmp_path)
    assert flights.new_dumps() == []
    path = tmp_path / "nccl-trace-1"
    path.write_bytes(pickle.dumps(dump())[:-9])
    assert flights.new_dumps() == []  # incomplete
    path.write_bytes(pickle.dumps(dump()))
    ((rank, (group,)),) = flights.new_dumps()
    assert (rank, group["ranks"], group["calls"][0]["seq"]) == (1, [0, 1], 7)
    assert not group["calls"][0]["done"]
    assert flights.new_dumps() == []
    path.write_bytes(pickle.dumps(dump(state="completed", collective_seq_id=10**6)))
    ((_, (group,)),) = flights.new_dumps()
    assert group["calls"][0]["done"]


def test_impossible_ranks_are_ignored(tmp_path: Path) -> None:
    flights = recorders(tmp_path)
    forged = dump()
    forged["pg_config"]["0"]["ranks"] = "[-1, 0, 7, 1e300, 12345678901]"
    (tmp_path / "nccl-trace-8").write_bytes(pickle.dumps(dump()))
    (tmp_path / "nccl-trace-7").write_bytes(pickle.dumps(forged))
    ((rank, (group,)),) = flights.new_dumps()
    assert (rank, group["ranks"]) == (7, [0, 7])


def test_old_collectives_and_point_to_point_messages_are_left_out(tmp_path: Path) -> None:
    entries = [ENTRY | {"is_p2p": True}, ENTRY | {"input_sizes": [[2]] * 99}]
    entries[1]["input_dtypes"] = ["Float"] * 99
    entries += [ENTRY | {"collective_seq_id": number} for number in range(8, 20)]
    flights = recorders(tmp_path)
    path = tmp_path / "nccl-trace-0"
    path.write_bytes(pickle.dumps({**dump(), "entries": entries}))
    ((_, (group,)),) = flights.new_dumps()
    assert [call["seq"] for call in group["calls"]] == [*range(12, 20)]
    assert [len(call["frames"]) for call in group["calls"]] == [0] * 7 + [1]
    path.write_bytes(pickle.dumps({**dump(), "entries": entries[:2]}))
    ((_, (group,)),) = flights.new_dumps()
    assert [len(call["tensors"]) for call in group["calls"]] == [8]


def test_a_large_dump_is_cut_to_fit_into_a_message(tmp_path: Path) -> None:
    def reported(members: int, sizes: int) -> list[dict[str, Any]]:
        frames = [{"name": "é" * 500, "filename": "é" * 500, "line": 1}] * 40
        odd = {"frames": frames, "input_sizes": [[1] * sizes]}
        entries = [ENTRY | odd | {"process_group": (str(n), "group")} for n in range(64)]
        ranks = str(list(range(members)))
        config = {str(n): {"ranks": ranks} for n in range(64)}
        flights = recorders(tmp_path)
        dumped = {"entries": entries, "pg_config": config}
        (tmp_path / "nccl-trace-0").write_bytes(pickle.dumps(dumped))
        ((_, groups),) = flights.new_dumps()
        assert len(encode({"groups": groups})) <= MAX_REPORTED + 20
        return groups

    groups = reported(members=2, sizes=2)
    assert [group["ranks"] for group in groups] == [[0, 1]] * 64
    assert not any(call["frames"] for group in groups for call in group["calls"])
    groups = reported(members=10_000, sizes=2)
    assert [group["ranks"] for group in groups] == [[]] * 64
    groups = reported(members=2, sizes=20_000)
    assert 0 < len(groups) < 64


def test_dumps_of_an_earlier_run_are_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "nccl-trace-1"
    path.write_bytes(pickle.dumps(dump()))
    flights = recorders(tmp_path)
    assert flights.new_dumps() == []
    path.write_bytes(pickle.dumps(dump(collective_seq_id=10**6)))
    ((rank, (group,)),) = flights.new_dumps()
    assert (rank, group["calls"][0]["seq"]) == (1, 10**6)


def test_a_dump_cannot_call_functions(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "done"),)

    flights = recorders(tmp_path)
    (tmp_path / "nccl-trace-0").write_bytes(pickle.dumps(dump(profiling_name=Evil())))
    (tmp_path / "nccl-trace-1").write_bytes(pickle.dumps([dump()]))
    (tmp_path / "nccl-trace-2").write_bytes(b"no pickle")
    (tmp_path / "nccl-trace-3").write_bytes(pickle.dumps(dump(input_sizes=[[b"x"]])))
    (tmp_path / "nccl-trace-4").write_bytes(pickle.dumps(dump(frames=3)))
    assert flights.new_dumps() == []
    assert not (tmp_path / "done").exists()


BOMBS = {
    "memo": b"\x80\x04]r\xf0\xff\xff\xff.",
    "lists": b"\x80\x04" + b"]" * (60 << 20),
    "nesting": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "repetition": pickle.dumps(
        dump(profiling_name=functools.reduce(lambda x, _: [x, x], range(40)))
    ),
    "integer": pickle.dumps(dump(collective_seq_id=1 << 4_000_000)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_bomb_is_contained(tmp_path: Path, bomb: str) -> None:
    flights = recorders(tmp_path)
    (tmp_path / "nccl-trace-0").write_bytes(BOMBS[bomb])
    os.mkfifo(tmp_path / "nccl-trace-2")
    (tmp_path / "nccl-trace-3").symlink_to("/dev/zero")
    assert flights.new_dumps() == []
    (tmp_path / "nccl-trace-1").write_bytes(pickle.dumps(dump()))
    assert [rank for rank, _ in flights.new_dumps()] == [1]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # in KiB


def test_a_dump_is_requested_through_the_ranks_pipe(tmp_path: Path) -> None:
    flights = recorders(tmp_path)
    assert not flights.request_dump(3)
    os.mkfifo(tmp_path / "nccl-ask-3.pipe")
    assert not flights.request_dump(3)  # it has no reader
    requests: list[bytes] = []
    reading = os.open(tmp_path / "nccl-ask-3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert flights.request_dump(3)
    reader = threading.Thread(target=lambda: requests.append(os.read(reading, 9)))
    reader.start()
    reader.join(HANG)
    os.close(reading)
    assert requests == [b"1"]


def test_variables_of_the_setup_lines_take_precedence(tmp_path: Path) -> None:
    chosen = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", FILES[1].decode(): "own-", PIPES.decode(): ""}
    environment = recorded(tmp_path, **chosen)
    assert environment == {
        b"TORCH_NCCL_TRACE_BUFFER_SIZE": b"0",
        b"TORCH_FR_BUFFER_SIZE": b"0",
        FILES[0]: b"own-",
        FILES[1]: b"own-",
        PIPES: b"",
        b"TORCH_NCCL_DUMP_ON_TIMEOUT": b"1",
    }
    flights = FlightRecorders(environment, os.fsencode(tmp_path), 8)
    assert not flights.request_dump(0)
    (tmp_path / "own-5").write_bytes(pickle.dumps(dump()))
    assert [rank for rank, _ in flights.new_dumps()] == [5]
