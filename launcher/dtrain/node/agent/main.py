"""Where the agent starts."""

from __future__ import annotations

import json
import os
import socket
import sys

from dtrain.node.agent.control import CONTROL_FD
from dtrain.node.agent.relay import Relay
from dtrain.node.agent.supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


def main() -> None:
    """`boot` and `code` were left in our globals by what loaded the agent: the stream that it
    came from, which goes on with commands or the request, and its compiled code."""
    boot: BinaryIO = globals()["boot"]
    if sys.argv[1] == "dtrain-supervisor":
        request = json.load(boot)
        boot.close()
        control = socket.socket(fileno=CONTROL_FD)
        control.set_inheritable(False)
        Supervisor(request, control).run()
    else:
        Relay(boot).run()
    sys.stderr.flush()
    os._exit(0)  # daemon threads and all


if __name__ == "__main__":
    main()
