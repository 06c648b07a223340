"""The command that turns a bare Python on a host into the node agent."""

from __future__ import annotations

from dtrain.quoting import path, sh, words

TOO_OLD = 86
"""Exit status of the agent where Python is older than 3.8; stderr names the version."""

# Runs on any Python since 2.7, as far as saying that it is too old. One line, without single
# quotes, exclamation marks and backslashes, so that sh, csh and fish all pass it on unchanged
# between single quotes. `boot` and `code` are what `agent.main` starts from.
BOOT = (
    "import sys;"
    "v=sys.version_info;"
    'v<(3,8) and (sys.stderr.write("dtrain: python %d.%d is too old" % v[:2]+chr(10)),'
    f"sys.exit({TOO_OLD}));"
    'sys.path=[p for p in sys.path if p not in ("",".")];'
    "boot=sys.stdin.buffer;"
    'n=int(boot.readline() or b"0");'
    "source=boot.read(n);"
    "n and len(source)==n or sys.exit(0);"
    'code=compile(source,"dtrain-agent","exec");'
    "exec(code)"
)


def boot_command(python: str, run: str) -> str:
    """The shell command that starts the agent; ``<bytes>\\n`` and the agent go to its stdin next.

    ``~/`` at the start of ``python`` is expanded by the host's shell. ``run`` is there to be
    seen in a list of processes. The options keep the host's PYTHON* variables, user packages
    and site packages away from the agent. Raises ValueError on a NUL.
    """
    return str(sh("exec ", path(python), " -ESs -c ", words([BOOT, "dtrain-agent", run])))
