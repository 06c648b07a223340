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
exec enroot start --rw --mount '/data:/data:none:x-create=auto,bind' --mount "$HOME"'/.cache:/cache:none:x-create=auto,bind' --mount '/models:/m:none:x-create=auto,bind,ro' --mount "$dtrain_workdir":"$dtrain_workdir"':none:x-create=auto,bind' --mount "$DTRAIN_RUN_DIR":"$DTRAIN_RUN_DIR"':none:x-create=auto,bind' --env 'NVIDIA_VISIBLE_DEVICES=all' --env 'NVIDIA_DRIVER_CAPABILITIES=compute,utility' --env 'DTRAIN_RUN_DIR='"$DTRAIN_RUN_DIR" --env 'HOME='"$DTRAIN_RUN_DIR" --env 'LD_PRELOAD=/opt/lib.so' --env CUDA_VISIBLE_DEVICES --env DTRAIN_ATTEMPT --env DTRAIN_HOST --env DTRAIN_RUN_ID --env LOCAL_RANK --env LOCAL_WORLD_SIZE --env LOGNAME --env MASTER_ADDR --env MASTER_PORT --env NCCL_DEBUG --env NNODES --env NODE_RANK --env PYTHONPATH --env PYTHONUNBUFFERED --env RANK --env TOKEN --env TORCHELASTIC_ERROR_FILE --env USER --env WORLD_SIZE --hostname enroot /shared/train.sqsh sh -c 'cd "$0" && exec "$@"' "$dtrain_workdir" python3 train.py --rank 1 'it'"'"'s'
