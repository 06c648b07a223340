"""How a program starts on a node: what its command line and the stream after it hold.

The command is a bare Python with `boot_text`, which has room for no request and no secret. It
reads ``<bytes>\\n`` and a packed program from a stream, executes it, and leaves the rest of the
stream to the program. The launcher starts programs in this way through SSH. So do programs on a
node that start others: the relay its supervisor, and the facts what runs in the job's Python.

Shipped to nodes: Python 3.8, standard library only.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing costs as much as importing json
if TYPE_CHECKING:
    from typing import Mapping

TOO_OLD = 86
"""Exit status where Python is older than 3.8; stderr names the version."""
ISOLATED = "-ESs"
"""Keeps the PYTHON* variables, user packages and site packages of the host away."""
IMPORTER = "dtrain.node.importer"
STDIN = "sys.stdin.buffer"


def boot_text(stream: str = STDIN, *, isolated: bool = True) -> str:
    """The program for ``python -c``, which reads from the expression ``stream``.

    ``isolated`` keeps modules of the working folder away; a program that runs in place of a worker
    imports what the worker would.
    """
    # Runs on any Python since 2.7, as far as saying that it is too old. One line, without single
    # quotes, exclamation marks and backslashes, so that sh, csh and fish all pass it on unchanged
    # between single quotes. A program that has not arrived whole is not executed.
    return (
        "import sys;"
        "v=sys.version_info;"
        'v<(3,8) and (sys.stderr.write("dtrain: python %d.%d is too old" % v[:2]+chr(10)),'
        f"sys.exit({TOO_OLD}));"
        + ('sys.path=[p for p in sys.path if p not in ("",".")];' if isolated else "")
        + f"stream={stream};"
        'n=int(stream.readline() or b"0");'
        "program=stream.read(n);"
        "n and len(program)==n or sys.exit(0);"
        'exec(compile(program,"dtrain-program","exec"))'
    )


def pack(main: str, modules: Mapping[str, str], compiled: bytes = b"") -> bytes:
    """The program whose ``main`` module is one of ``modules`` (source text by name, the importer
    among them), with what `Importer.compiled` gave for the same Python."""
    return (
        "modules=%r\n"
        "exec(compile(modules[%r],%r,'exec'))\n"
        "start(stream,%r,modules,%r)\n"
        % (dict(modules), IMPORTER, file_of(IMPORTER), main, compiled)
    ).encode()


def framed(program: bytes) -> bytes:
    """A packed program as `boot_text` reads it from its stream."""
    return b"%d\n%b" % (len(program), program)


def file_of(module: str) -> str:
    """What tracebacks call a module's file."""
    return module.replace(".", "/") + ".py"
