#!/usr/bin/env bash
# worker 7 of resnet; run it on gpu08:
#   bash worker-7.sh
# Written by `dtrain launch --dry-run --output`.

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
workdir=$PWD
set -o allexport
. "$here"/worker-7.env || exit
set +o allexport
cd -- "$workdir" || exit
exec python3 train.py
