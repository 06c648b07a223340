#!/usr/bin/env bash
# worker 6 of resnet; run it on gpu07:
#   bash worker-6.sh
# Written by `dtrain launch --dry-run --output`.

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
workdir=$PWD
set -o allexport
. "$here"/worker-6.env || exit
set +o allexport
cd -- "$workdir" || exit
exec python3 train.py
