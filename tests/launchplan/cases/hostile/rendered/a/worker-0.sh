#!/usr/bin/env bash
# worker 0 of hostile; run it on a:
#   bash worker-0.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
: "${TOKEN:?is a secret: export it first}"
cd -- ~/'my runs/$HOME' || exit
dtrain_workdir=$PWD
eval 'export A='"'"'b c'"'"'' || exit
eval 'if true; then
  B=1
fi  # a comment' || exit
set -o allexport
. "$dtrain_here"/worker-0.env || exit
set +o allexport
export TOKEN
cd -- "$dtrain_workdir" || exit
exec python3 'my train.py; echo $(id)' 'it'"'"'s' 'a "b"' '$(touch /tmp/x)' 'line
break' '' -n '~' 'back'\\'slash' 'ü'
