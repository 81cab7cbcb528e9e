#!/bin/bash
# bert_sentiment (tiny) on 2 x local, cluster local: precompile
# Written by trnslurm 0.1.0. Paths are relative to this directory, so these bytes
# can be reviewed, copied and submitted as they are.
#
#   global batch G   16         micro-batch m    4
#   workers W        2          = 2 x 1 per node
#   units U = G/m    4          accumulation A   2 per worker and step
#   steps            1000000    zero-weight      0 units per step (0.0 %)
#
# By hand, from this directory:
#   bash precompile.sh && bash train.sh

set -euo pipefail
umask 077
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
TRNSLURM_JOB="\"job_id\": \"local-$$\", \"restarts\": 0,"

# The attempt takes its number by creating its state file: only one can. A line below that fails is
# recorded there, until trnslurm.node.attempt, in the last line, keeps that file.
export TRNSLURM_PHASE=precompile TRNSLURM_ATTEMPT=1
until (set -o noclobber && : > "state/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT.json") 2> /dev/null; do
  if [ ! -e "state/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT.json" ]; then
    echo "error: cannot write in $PWD/state: check its owner, its mode and the disk" >&2
    exit 1
  fi
  TRNSLURM_ATTEMPT=$((TRNSLURM_ATTEMPT + 1))
done
TRNSLURM_JOB+=" \"started\": \"$(date -u +%FT%TZ)\""
record() { echo "{$TRNSLURM_JOB$*}" > "state/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT.json"; }
failed() {
  local code=$(($1 ? $1 : 1)) state=FAILED  # even `exit 0` in a line of `activate` is a failure
  if [ "$code" -eq 143 ]; then state=CANCELLED; fi
  record ", \"state\": \"$state\", \"reason\": \"exit code $code while $TRNSLURM_DOING\"," \
    "\"exit_code\": $code, \"ended\": \"$(date -u +%FT%TZ)\""
  echo "$TRNSLURM_PHASE attempt $TRNSLURM_ATTEMPT: $state (exit code $code while $TRNSLURM_DOING)"
  exit "$code"
}
TRNSLURM_DOING='setting up the environment'
trap 'failed $?' EXIT
trap 'exit 143' TERM INT HUP
trap '' USR1                                # the time limit is near: there is nothing to save yet
record

# Environment: closed. What the job sees is what stands here.
TRNSLURM_DEFAULT_PYTHON=python3
export TRNSLURM_PYTHON="${TRNSLURM_PYTHON:-$TRNSLURM_DEFAULT_PYTHON}"
export PYTHONPATH="$PWD/code"               # the snapshot: later edits of the source change nothing
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export TRNSLURM_RUN_DIR="$PWD" TRNSLURM_DEVICE=xla-cpu
export TRNSLURM_CACHE="$HOME/"trnslurm-runs/.compiled  # compiled graphs, and their manifests
export TRNSLURM_CACHE_LAYOUT=shared
export TRNSLURM_CACHE_TRUST=''             # compile_trust: users besides this one and root
TRNSLURM_DOING='starting Python'
"$TRNSLURM_PYTHON" -c 'import trnslurm.node.attempt'

# Rendezvous: where the workers meet.
TRNSLURM_DOING='choosing the master address and ports'
TRNSLURM_HOSTS=local-0,local-1
MASTER_ADDR=127.0.0.1
TRNSLURM_PORTS=$("$TRNSLURM_PYTHON" -m trnslurm.node.ports "local-$$" 0)
export TRNSLURM_HOSTS MASTER_ADDR MASTER_PORT="${TRNSLURM_PORTS% *}"

# Launch. This program keeps the state file and the heartbeat, takes TERM and USR1, has the workers
# save, and requeues the job or gives it up. It has this script's pid; srun's exit code is its own.
exec "$TRNSLURM_PYTHON" -m trnslurm.node.attempt \
  --graphs -- \
  "$TRNSLURM_PYTHON" -m trnslurm.node.local_srun --nodes 2 \
  --output "logs/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT-node%n.log" \
  -- bash node.sh precompile
