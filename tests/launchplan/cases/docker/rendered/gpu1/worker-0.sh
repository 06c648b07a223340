#!/usr/bin/env bash
# worker 0 of gpt; run it on gpu1:
#   bash worker-0.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
: "${TOKEN:?is a secret: export it first}"
cd -- ~ || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/worker-0.env || exit
set +o allexport
export TOKEN
cd -- "$dtrain_workdir" || exit
exec docker run --rm --name dtrain-"${DTRAIN_RUN_ID:-gpt}"-worker-0 --pull=never --log-driver=none --network=host --ipc=host --pid=host --security-opt 'label=disable' --user "$(id -u):$(id -g)" --gpus all --mount 'type=bind,src=/data,dst=/data' --mount 'type=bind,src='"$HOME"'/.cache,dst=/cache' --mount 'type=bind,src=/models,dst=/m,ro' --mount 'type=bind,src='"$dtrain_workdir"',dst='"$dtrain_workdir"'' --mount 'type=bind,src='"$DTRAIN_RUN_DIR"',dst='"$DTRAIN_RUN_DIR"'' --workdir "$dtrain_workdir" --entrypoint '' --env 'DTRAIN_RUN_DIR='"$DTRAIN_RUN_DIR" --env 'HOME='"$DTRAIN_RUN_DIR" --env 'LD_PRELOAD=/opt/lib.so' --env CUDA_VISIBLE_DEVICES --env DTRAIN_ATTEMPT --env DTRAIN_HOST --env DTRAIN_RUN_ID --env LOCAL_RANK --env LOCAL_WORLD_SIZE --env LOGNAME --env MASTER_ADDR --env MASTER_PORT --env NCCL_DEBUG --env NNODES --env NODE_RANK --env PYTHONPATH --env PYTHONUNBUFFERED --env RANK --env TOKEN --env TORCHELASTIC_ERROR_FILE --env USER --env WORLD_SIZE --hostname docker nvcr.io/nvidia/pytorch:25.06-py3 python3 train.py --rank 0 'it'"'"'s'
