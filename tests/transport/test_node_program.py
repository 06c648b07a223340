"""Why one of dtrain's programs did not start on a host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host
from dtrain.transport import node_program
from dtrain.transport.local import LocalTransport
from support.scripted import ScriptedProcess

CASES = {
    "missing": ("there is no {python}", "cluster.python"),
    "version manager": ("there is no {python} (not found\nin these: 3.12.1)", "cluster.python"),
    "not-executable": ("{python} cannot be executed", "cluster.python"),
    "too-old": ("{python} cannot run dtrain: python 3.6 is too old", "3.8 or newer"),
    "replaced": ("another shell ran there in place of {python}", "`exec`"),
    "killed": ("killed by SIGTERM", "out of memory"),
    "ends": ("{python} ended with status 3: no memory", "log in there"),
}
SCRIPTS = {
    "not-executable": "#!/bin/sh\n",
    "version manager": "#!/bin/sh\nprintf 'not found\\nin these: 3.12.1\\n' >&2; exit 127\n",
    "too-old": '#!/bin/sh\necho Welcome\nwhile [ "$1" != -c ]; do shift; done\n'
    f'exec {sys.executable} -c "import sys; sys.version_info = (3, 6, 8)\n$2"\n',
    "replaced": "#!/bin/sh\nexec sh\n",
    "killed": "#!/bin/sh\nkill $$\n",
    "ends": "#!/bin/sh\necho no memory\nexit 3\n",
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_host_command_and_remedy(case: str, tmp_path: Path) -> None:
    python = str(tmp_path / "python")
    if script := SCRIPTS.get(case):
        Path(python).write_text(script)
        Path(python).chmod(0o755 if case != "not-executable" else 0o644)
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
    assert reason.format(python=python) in error.message
    assert remedy in error.hint


def test_a_connection_that_ends_after_the_output_is_the_error() -> None:
    class Cut(ScriptedProcess):
        def wait(self, timeout: float | None = None) -> int:
            raise lost

    lost = ConnectError("node1", "waiting for a command", "the server closed the connection")
    assert node_program.failure("node1", "checking", "python3", Cut(b""), b"") is lost
