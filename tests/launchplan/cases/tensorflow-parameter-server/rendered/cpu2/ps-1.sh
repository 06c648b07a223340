#!/usr/bin/env bash
# ps 1 of wide-and-deep; run it on cpu2:
#   bash ps-1.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/ps-1.env || exit
set +o allexport
cd -- "$dtrain_workdir" || exit
exec python3 -m wide.train
