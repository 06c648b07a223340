#!/usr/bin/env bash
# worker 1 of gpt; run it on gpu1:
#   bash worker-1.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
: "${TOKEN:?is a secret: export it first}"
cd -- ~ || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/worker-1.env || exit
set +o allexport
export TOKEN
cd -- "$dtrain_workdir" || exit
exec podman run --rm --name dtrain-"${DTRAIN_RUN_ID:-gpt}"-worker-1 --pull=never --log-driver=none --network=host --ipc=host --pid=host --security-opt 'label=disable' --userns="$([ "$(id -u)" = 0 ] && echo host || echo keep-id)" --user "$(id -u):$(id -g)" --device 'nvidia.com/gpu=all' --mount 'type=bind,src=/data,dst=/data' --mount 'type=bind,src='"$HOME"'/.cache,dst=/cache' --mount 'type=bind,src=/models,dst=/m,ro' --mount 'type=bind,src='"$dtrain_workdir"',dst='"$dtrain_workdir"'' --mount 'type=bind,src='"$DTRAIN_RUN_DIR"',dst='"$DTRAIN_RUN_DIR"'' --workdir "$dtrain_workdir" --entrypoint '' --env 'DTRAIN_RUN_DIR='"$DTRAIN_RUN_DIR" --env 'HOME='"$DTRAIN_RUN_DIR" --env 'LD_PRELOAD=/opt/lib.so' --env CUDA_VISIBLE_DEVICES --env DTRAIN_ATTEMPT --env DTRAIN_HOST --env DTRAIN_RUN_ID --env LOCAL_RANK --env LOCAL_WORLD_SIZE --env LOGNAME --env MASTER_ADDR --env MASTER_PORT --env NCCL_DEBUG --env NNODES --env NODE_RANK --env PYTHONPATH --env PYTHONUNBUFFERED --env RANK --env TOKEN --env TORCHELASTIC_ERROR_FILE --env USER --env WORLD_SIZE --hostname podman nvcr.io/nvidia/pytorch:25.06-py3 python3 train.py --rank 1 'it'"'"'s'
