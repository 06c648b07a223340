#!/usr/bin/env bash
# worker 1 of local; run it on node0:
#   bash worker-1.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- .. || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/worker-1.env || exit
set +o allexport
if [ -z "${GLOO_SOCKET_IFNAME+set}" ] && dtrain_route=$(ip -o route get "$(getent ahosts 127.0.0.1 | awk 'NR == 1 {print $1}')"); then
  dtrain_route=${dtrain_route#* dev }
  export GLOO_SOCKET_IFNAME=${dtrain_route%% *}
fi
[ -z "${GLOO_SOCKET_IFNAME+set}" ] || export TP_SOCKET_IFNAME=${TP_SOCKET_IFNAME-$GLOO_SOCKET_IFNAME}
cd -- "$dtrain_workdir" || exit
exec python3 scripts/train.py
