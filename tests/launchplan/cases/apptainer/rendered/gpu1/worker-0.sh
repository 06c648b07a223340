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
for dtrain_name in CUDA_VISIBLE_DEVICES MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK NNODES NCCL_DEBUG LD_PRELOAD DTRAIN_RUN_ID DTRAIN_HOST DTRAIN_ATTEMPT RANK LOCAL_RANK DTRAIN_RUN_DIR PYTHONPATH PYTHONUNBUFFERED TORCHELASTIC_ERROR_FILE TOKEN; do
  [ -z "${!dtrain_name+set}" ] || export "APPTAINERENV_$dtrain_name=${!dtrain_name}"
done
cd -- "$dtrain_workdir" || exit
exec apptainer exec --cleanenv --nv --mount 'type=bind,src=/data,dst=/data' --mount 'type=bind,src='"$HOME"'/.cache,dst=/cache' --mount 'type=bind,src=/models,dst=/m,ro' --mount 'type=bind,src='"$dtrain_workdir"',dst='"$dtrain_workdir"'' --mount 'type=bind,src='"$DTRAIN_RUN_DIR"',dst='"$DTRAIN_RUN_DIR"'' --pwd "$dtrain_workdir" --hostname apptainer /shared/train.sif python3 train.py --rank 0 'it'"'"'s'
