#!/usr/bin/env bash
# torchrun 1 of static; run it on b:
#   bash torchrun-1.sh
# Written by `dtrain launch --dry-run --output`.

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
set -o allexport
. "$here"/torchrun-1.env || exit
set +o allexport
cd -- ~ || exit
exec python3 -m torch.distributed.run '--nnodes=2' '--nproc-per-node=2' '--max-restarts=0' '--rdzv-id=static' '--rdzv-backend=static' '--local-addr=b' '--node-rank=1' '--master-addr=a' '--master-port=12345' train.py
