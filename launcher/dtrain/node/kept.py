"""Keeps programs, so that the next launch need not send or pack them again.

A program has about 500 kB, and a launcher may reach its hosts over a slow network. Hosts keep it
under the digest of its payload, and compare the two before they start it, see `kept`. The launching
machine keeps what it has packed in the same way, and the digest under that of the sources, in a
folder that only its user can change. Whatever fails here costs only time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat

from dtrain.node.boot import NOT_KEPT, framed, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

FOLDER = "/tmp/dtrain-programs-%d"
"""With the number of the user. On the machine's own disk: a file server may not answer."""
MOST = 16
"""Files in the folder: of several versions of dtrain and of Python."""


def kept(main: str, payload: bytes) -> bytes:
    """A framed program with the ``main`` module of a ``payload`` that the host has kept. It ends
    with `NOT_KEPT` if there is none. The file may be anything, such as a pipe or a folder."""
    flags = "os.O_RDONLY|os.O_NONBLOCK|os.O_NOFOLLOW|os.O_CLOEXEC"
    read = (
        "import os\n"
        "try:from _sha2 import sha256\n"  # `hashlib` takes longer to import
        "except ImportError:\n"
        " try:from _sha256 import sha256\n"
        " except ImportError:from hashlib import sha256\n"
        "try:\n"
        " with open(os.open(%r %% os.geteuid()+%r,%s),'rb') as file:payload=file.read(%d) or b''\n"
        "except OSError:payload=b''\n"
        "sha256(payload).hexdigest()==%r or sys.exit(%r)\n"
    )
    digest = digest_of(payload)
    read %= (FOLDER, f"/{digest}", flags, len(payload), digest, NOT_KEPT)
    return framed((read + unpack(main)).encode())


def digest_of(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def keep(name: str, payload: bytes) -> None:
    """Keep a file with the content ``payload``, if this machine lets us."""
    with contextlib.suppress(OSError), _own_folder() as folder:
        part = "%s.%d" % (name, os.getpid())
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            with open(fd, "wb") as file:
                file.write(payload)
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:  # the disk is full
            os.unlink(part, dir_fd=folder)
            raise
        written = {name: os.stat(name, dir_fd=folder).st_mtime for name in os.listdir(folder)}
        for old in sorted(written, key=lambda one: -written[one])[MOST:]:
            os.unlink(old, dir_fd=folder)


def read(name: str) -> bytes | None:
    """What this machine has kept under ``name``."""
    with contextlib.suppress(OSError), _own_folder() as folder:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        with open(fd, "rb") as file:
            return file.read()
    return None


@contextlib.contextmanager
def _own_folder() -> Iterator[int]:
    """The folder, if only we can change it. Raises OSError."""
    path = FOLDER % os.geteuid()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise PermissionError(path)
        yield folder
    finally:
        os.close(folder)
