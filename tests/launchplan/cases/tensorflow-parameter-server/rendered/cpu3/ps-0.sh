#!/usr/bin/env bash
# ps 0 of wide-and-deep; run it on cpu3:
#   bash ps-0.sh
# Written by `dtrain launch --dry-run --output`.

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
workdir=$PWD
set -o allexport
. "$here"/ps-0.env || exit
set +o allexport
cd -- "$workdir" || exit
exec python3 -m wide.train
