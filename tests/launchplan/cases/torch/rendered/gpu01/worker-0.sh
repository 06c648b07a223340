#!/usr/bin/env bash
# worker 0 of gpt-100b; run it on gpu01:
#   bash worker-0.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
: "${WANDB_API_KEY:?is a secret: export it first}"
cd -- ~/runs/gpt || exit
dtrain_workdir=$PWD
eval 'source ~/env.sh' || exit
set -o allexport
. "$dtrain_here"/worker-0.env || exit
set +o allexport
export WANDB_API_KEY
cd -- "$dtrain_workdir" || exit
exec /opt/venv/bin/python train.py --config gpt.yaml
