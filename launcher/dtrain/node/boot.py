"""Starts a program on a node: its command line, and the stream that follows.

The command is a bare Python with `boot_text`, which contains no request and no secret. It reads
from a stream a line with the size of a packed program, and that program, executes it, and leaves
the rest of the stream to it. The launcher starts programs in this way through SSH. On a node, the
relay starts its supervisor in this way, and the facts program starts programs in the job's Python.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing costs as much as importing json
if TYPE_CHECKING:
    from typing import Mapping

TOO_OLD = 86
"""Exit status if Python is older than 3.8; stderr names the version."""
REPLACED = 87
"""Exit status of a shell that reads the stream in place of Python."""
NOT_KEPT = "dtrain: this host has not kept the program"
"""On stderr. A ForceCommand of the host's sshd may change the exit status."""
HEAD = "exit %d;#" % REPLACED
"""Stands before the size. A login script may replace the shell with another one (``exec zsh -i``),
which has no command and so reads the stream: it must not execute a Python program as commands. With
``;`` it ends even if its settings give ``#`` no meaning."""
NO_INPUT = "dtrain: a login script has closed or read its input, or closed its output"
ISOLATED = "-ESs"
"""Ignores the PYTHON* variables, user packages and site packages of the host."""
IMPORTER = "dtrain.node.importer"
STDIN = 'sys.stdout and getattr(sys.stdin,"buffer",None)'


def boot_text(stream: str = STDIN, *, isolated: bool = True) -> str:
    """The program for ``python -c``. It reads from the expression ``stream``.

    ``isolated`` hides modules of the working folder. A program that runs in place of a worker is
    not isolated, so that it imports the same modules as the worker.
    """
    # Any Python since 2.7 runs it far enough to report that it is too old. It is one line without
    # single quotes, exclamation marks and backslashes, so that sh, csh and fish all pass it
    # unchanged between single quotes. It does not execute an incomplete program.
    return (
        "import sys;"
        "v=sys.version_info;"
        'v<(3,8) and (sys.stderr.write("dtrain: python %d.%d is too old" % v[:2]+chr(10)),'
        f"sys.exit({TOO_OLD}));"
        + ('sys.path=[p for p in sys.path if p not in ("",".")];' if isolated else "")
        + f"stream={stream};"
        f'head=stream.readline() or b"{HEAD}0" if stream else b"";'
        f'n=head.partition(b"{HEAD}")[2].strip();'
        f'n.isdigit() or sys.exit("{NO_INPUT}");'
        "n=int(n);"
        "program=stream.read(n);"
        "n and len(program)==n or sys.exit(0);"
        'exec(compile(program,"dtrain-program","exec"))'
    )


def pack(main: str, modules: Mapping[str, str]) -> bytes:
    """The program whose ``main`` module is one of ``modules`` (source text by name, including the
    importer)."""
    return ("code,files={},{}\nsources=lambda:%r\n%s" % (dict(modules), _run(main))).encode()


def bundle(main: str, payload: bytes, *, keep: bool = False) -> bytes:
    """The same program with compiled code, framed. ``payload`` is the result of `pack_code` in
    `dtrain.node.importer`. With ``keep``, the host keeps it."""
    # As in `boot_text`, a stream that ends early executes nothing.
    read = "payload=stream.read(%d)\nlen(payload)==%d or sys.exit(0)\n" % ((len(payload),) * 2)
    return framed((read + unpack(main, "payload" if keep else 'b""')).encode()) + payload


def unpack(main: str, to_keep: str = 'b""') -> str:
    """The rest of a program that has read its ``payload``. ``to_keep``: an expression, see `start`
    in `dtrain.node.importer`."""
    return (
        "import gc,marshal,zlib\n"
        "from _frozen_importlib_external import MAGIC_NUMBER\n"
        "gc.disable()\n"
        "magic,code,packed,files=marshal.loads(payload)\n"
        "code=marshal.loads(zlib.decompress(code)) if magic==MAGIC_NUMBER else {}\n"
        "sources=lambda:marshal.loads(zlib.decompress(packed))\n"
    ) + _run(main, to_keep)


def _run(main: str, to_keep: str = 'b""') -> str:
    compiled = "compile(sources()[%r],%r,'exec')" % (IMPORTER, file_of(IMPORTER))
    importer = "exec(code[%r] if code else %s)\n" % (IMPORTER, compiled)
    return importer + "start(stream,%r,code,sources,files,%s)\n" % (main, to_keep)


def framed(program: bytes) -> bytes:
    """A packed program as `boot_text` reads it from its stream."""
    return b"%b%d\n%b" % (HEAD.encode(), len(program), program)


def file_of(module: str) -> str:
    """The file name of a module in tracebacks."""
    return module.replace(".", "/") + ".py"
