#!/usr/bin/env bash
# ps 1 of wide-and-deep; run it on cpu2:
#   bash ps-1.sh
# Written by `dtrain launch --dry-run --output`.

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
workdir=$PWD
set -o allexport
. "$here"/ps-1.env || exit
set +o allexport
cd -- "$workdir" || exit
exec python3 -m wide.train
