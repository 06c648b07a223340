#!/usr/bin/env bash
# worker 1 of resnet; run it on gpu02:
#   bash worker-1.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/worker-1.env || exit
set +o allexport
cd -- "$dtrain_workdir" || exit
exec python3 train.py
