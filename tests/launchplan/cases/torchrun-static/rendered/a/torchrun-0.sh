#!/usr/bin/env bash
# torchrun 0 of static; run it on a:
#   bash torchrun-0.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/torchrun-0.env || exit
set +o allexport
if [ -z "${GLOO_SOCKET_IFNAME+set}" ] && dtrain_route=$(ip -o route get "$(getent ahosts b | awk 'NR == 1 {print $1}')"); then
  dtrain_route=${dtrain_route#* dev }
  export GLOO_SOCKET_IFNAME=${dtrain_route%% *}
fi
[ -z "${GLOO_SOCKET_IFNAME+set}" ] || export TP_SOCKET_IFNAME=${TP_SOCKET_IFNAME-$GLOO_SOCKET_IFNAME}
cd -- "$dtrain_workdir" || exit
exec python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --max-restarts=0 --rdzv-id="${DTRAIN_RUN_ID:-static}" --rdzv-backend=static --local-addr=a --node-rank=0 --master-addr=a --master-port=12345 train.py
