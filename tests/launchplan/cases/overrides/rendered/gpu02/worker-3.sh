#!/usr/bin/env bash
# worker 3 of overrides; run it on gpu02:
#   bash worker-3.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
: "${WANDB_API_KEY:?is a secret: export it first}"
cd -- ~/runs/gpt || exit
dtrain_workdir=$PWD
eval 'source ~/env.sh' || exit
set -o allexport
. "$dtrain_here"/worker-3.env || exit
set +o allexport
export WANDB_API_KEY
cd -- "$dtrain_workdir" || exit
exec /opt/venv/bin/python train.py --config gpt.yaml
