#!/bin/bash
# One Ray cluster over all nodes: node 0 is the head and runs train.py.
#
#     trnslurm submit ./train.sh --nodes 2 -- {master_addr}:{master_port} {workers} {workers_per_node}
#
# The nodes share the working directory: Ray's token and the end of train.py are files there.
set -eu
export RAY_ADDRESS=$1 RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/token-$TRNSLURM_ATTEMPT
ended=ended-$TRNSLURM_ATTEMPT

place=(--address "$RAY_ADDRESS")
if [ "$SLURM_NODEID" = 0 ]; then
  place=(--head --port "${RAY_ADDRESS##*:}" --include-dashboard false)
  (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > token.new)
  mv token.new "$RAY_AUTH_TOKEN_PATH"
fi
until [ -e "$RAY_AUTH_TOKEN_PATH" ]; do sleep 1; done
ray start --block --num-cpus "$3" "${place[@]}" &
trap 'kill $!; wait' EXIT

if [ "$SLURM_NODEID" = 0 ]; then
  python train.py --workers "$2" --out "$TRNSLURM_CHECKPOINTS" \
    ${TRNSLURM_RESUME:+--resume "$TRNSLURM_RESUME"}
  touch "$ended"
fi
until [ -e "$ended" ]; do
  kill -0 $!  # fails if Ray has ended
  sleep 1
done
