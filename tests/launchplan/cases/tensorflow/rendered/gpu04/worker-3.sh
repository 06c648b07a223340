#!/usr/bin/env bash
# worker 3 of resnet; run it on gpu04:
#   bash worker-3.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/worker-3.env || exit
set +o allexport
cd -- "$dtrain_workdir" || exit
exec python3 train.py
