"""Why one of dtrain's programs did not start on a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.spec.model import Host
from dtrain.transport import node_program
from dtrain.transport.local import LocalTransport
from support.node import pythons

CASES = {
    "missing": ("there is no {python}", "cluster.python"),
    "not-executable": ("{python} cannot be executed", "cluster.python"),
    "too-old": ("{python} cannot run dtrain: python {old} is too old", "3.8 or newer"),
    "ends": ("{python} ended with status 3: no memory", "log in there"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_host_command_and_remedy(case: str, tmp_path: Path) -> None:
    python, old = str(tmp_path / "python"), ""
    if case == "not-executable":
        Path(python).write_text("")
    elif case == "ends":
        Path(python).write_text("#!/bin/sh\necho no memory\nexit 3\n")
        Path(python).chmod(0o755)
    elif case == "too-old":
        olds = sorted(version for version in pythons() if version < (3, 8))
        if not olds:
            pytest.skip("every Python here is new enough")
        old, python = "{}.{}".format(*olds[0]), pythons()[olds[0]]
    connection = LocalTransport().connect(Host("node1", "127.0.0.1", transport="local"))
    try:
        process = node_program.start(connection, "facts", python, label="check")
        output = b""
        while data := process.read():
            output += data
        error = node_program.failure("node1", "checking", python, process, output)
    finally:
        connection.close()
    reason, remedy = CASES[case]
    assert error.message.startswith("node1: checking: ")
    assert reason.format(python=python, old=old) in error.message
    assert remedy in error.hint
