"""Sum one number per rank over gloo, check it, and print this rank's place as JSON."""

import json
import os
import socket
import sys

import torch
import torch.distributed as dist

NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME",
)  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        expected = world * (world + 1) / 2
        if total.item() != expected:
            raise AssertionError(f"the sum is {total.item()}, not {expected}")
        summary = {
            "hostname": socket.gethostname(),
            "cwd": os.getcwd(),
            "argv": sys.argv[1:],
            "sum": total.item(),
            "environment": {name: os.environ[name] for name in NAMES if name in os.environ},
        }
        print(json.dumps(summary, sort_keys=True))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
