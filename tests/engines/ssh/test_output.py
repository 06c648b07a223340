"""What one host sends of its workers' output, over several connections."""

from __future__ import annotations

from pathlib import Path

from dtrain.engines.ssh.output import HostOutput
from dtrain.messages.agent import StreamFound
from dtrain.node.protocol import Data
from dtrain.runs.folder import RunFolder


def test_a_file_emptied_before_a_reconnection_is_no_fault_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    output = HostOutput("gpu01", RunFolder(tmp_path), ranked=True)
    found = StreamFound(1, "worker-0.out")
    output.add(found)
    output.keep(Data(1, 0, b"old "))
    file = tmp_path / "logs/gpu01/worker-0.out"
    file.write_bytes(b"")  # the user needs the space
    output.begin_relay()
    output.add(found)
    assert output.keep(Data(1, 4, b"new")) is not None
    assert file.read_bytes() == bytes(4) + b"new"
    assert output.offsets == {"worker-0.out": 7}
