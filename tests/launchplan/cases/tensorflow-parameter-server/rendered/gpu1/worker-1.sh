#!/usr/bin/env bash
# worker 1 of wide-and-deep; run it on gpu1:
#   bash worker-1.sh
# Written by `dtrain launch --dry-run --output`.

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
workdir=$PWD
set -o allexport
. "$here"/worker-1.env || exit
set +o allexport
cd -- "$workdir" || exit
exec python3 -m wide.train
