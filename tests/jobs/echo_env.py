"""Print this process's arguments, environment and folder as one line of JSON.

Bytes that are not text become Python's surrogate escapes. Standard library only.
"""

import json
import os
import resource
import socket
import sys


def main() -> None:
    print(
        json.dumps(
            {
                "argv": sys.argv[1:],
                "cwd": os.getcwd(),
                "environment": dict(os.environ),
                "executable": sys.executable,
                "hostname": socket.gethostname(),
                "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                "stdin": os.readlink("/proc/self/fd/0"),
            },
            sort_keys=True,
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
