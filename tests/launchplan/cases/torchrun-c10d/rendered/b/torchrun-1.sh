#!/usr/bin/env bash
# torchrun 1 of c10d; run it on b:
#   bash torchrun-1.sh
# Written by `dtrain launch --dry-run --output`.

dtrain_here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit
cd -- ~ || exit
dtrain_workdir=$PWD
set -o allexport
. "$dtrain_here"/torchrun-1.env || exit
set +o allexport
if [ -z "${GLOO_SOCKET_IFNAME+set}" ] && dtrain_route=$(ip -o route get "$(getent ahosts 2001:db8::1 | awk 'NR == 1 {print $1}')"); then
  dtrain_route=${dtrain_route#* dev }
  export GLOO_SOCKET_IFNAME=${dtrain_route%% *}
fi
[ -z "${GLOO_SOCKET_IFNAME+set}" ] || export TP_SOCKET_IFNAME=${TP_SOCKET_IFNAME-$GLOO_SOCKET_IFNAME}
cd -- "$dtrain_workdir" || exit
exec python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --max-restarts=0 --rdzv-id="${DTRAIN_RUN_ID:-c10d}" --rdzv-backend=c10d --local-addr=2001:db8::2 '--rdzv-endpoint=[2001:db8::1]:'"${MASTER_PORT:-29500}" --rdzv-conf=is_host=false -m my.train --lr 1e-5
