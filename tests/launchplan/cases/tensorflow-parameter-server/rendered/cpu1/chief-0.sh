#!/usr/bin/env bash
# chief 0 of wide-and-deep; run it on cpu1:
#   bash chief-0.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/chief-0.env || exit
set +o allexport
cd -- "$dtrain_workdir" || exit
exec python3 -m wide.train
