"""All ranks connect. Then rank R fails, and the other ranks wait for it forever.

    fail.py R [raise | exit | kill | stop]

``raise`` ends in a traceback (the default), ``exit`` in status 7, ``kill`` in SIGKILL, and
``stop`` stops the process without ending it. Ranks meet in a torch process group, so that the
other ranks fail ("Connection closed by peer") right after the cause.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    unlucky, how = int(sys.argv[1]), (sys.argv[2:] or ["raise"])[0]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    print(f"rank {rank} met the others", flush=True)
    if rank == unlucky:
        if how == "raise":
            raise ValueError(f"bad batch on rank {rank}")
        if how == "exit":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
