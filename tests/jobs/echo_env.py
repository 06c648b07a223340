"""Print as one line of JSON what this process was given: arguments, environment, folder.

Bytes that are no text travel as Python's surrogate escapes. Standard library alone.
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
