#!/usr/bin/env bash
# worker 2 of local; run it on node1:
#   bash worker-2.sh
# Written by `dtrain launch --dry-run --output`.

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- .. || exit
workdir=$PWD
set -o allexport
. "$here"/worker-2.env || exit
set +o allexport
if [ -z "${GLOO_SOCKET_IFNAME+set}" ] && route=$(ip -o route get "$(getent ahosts 127.0.0.1 | awk 'NR == 1 {print $1}')"); then
  route=${route#* dev }
  export GLOO_SOCKET_IFNAME=${route%% *}
fi
[ -z "${GLOO_SOCKET_IFNAME+set}" ] || export TP_SOCKET_IFNAME=${TP_SOCKET_IFNAME-$GLOO_SOCKET_IFNAME}
cd -- "$workdir" || exit
exec python3 scripts/train.py
