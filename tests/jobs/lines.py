"""Write numbered lines to stdout and stderr at full speed, and record what was written.

    lines.py FOLDER LINES

FOLDER/RANK.json (this rank's, on the node) holds the number of bytes and the sha256 of either
stream, to compare with what arrived. The lines include what views must survive and a store must
keep: a progress bar, ANSI colors, invalid UTF-8, a line of 1 MB, and a last line without its end.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

CHUNK = 500


class Counted:
    """A binary stream that counts and hashes its data."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.size, self.hash = descriptor, 0, hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self.hash.update(data)
        while data:
            data = data[os.write(self.descriptor, data) :]


def main() -> None:
    folder, lines = Path(sys.argv[1]).expanduser(), int(sys.argv[2])
    rank = os.environ.get("RANK", "0")
    folder.mkdir(parents=True, exist_ok=True)
    out, err = Counted(1), Counted(2)
    out.write(b"\x1b[32mgreen\x1b[0m caf\xe9 \xff\xfe\n")
    out.write(b"".join(b"\r%3d%%" % percent for percent in range(0, 101, 10)) + b"\n")
    out.write(b"x" * 1_000_000 + b"\n")
    for start in range(0, lines, CHUNK):
        numbers = range(start, min(start + CHUNK, lines))
        out.write(b"".join(b"out %s %09d abcdefghij\n" % (rank.encode(), n) for n in numbers))
        if start % (CHUNK * 10) == 0:
            err.write(b"".join(b"err %s %09d\n" % (rank.encode(), n) for n in numbers))
    out.write(b"no end")
    note = {
        name: {"size": stream.size, "sha256": stream.hash.hexdigest()}
        for name, stream in (("stdout", out), ("stderr", err))
    }
    (folder / f"{rank}.json").write_text(json.dumps(note))


if __name__ == "__main__":
    main()
