#!/bin/bash
# mine (short) on 2 x local, cluster here: train
# Written by trnslurm 0.1.0. Paths are relative to this directory, so these bytes
# can be reviewed, copied and submitted as they are.
#
#   global batch G   4          micro-batch m    2
#   workers W        2          = 2 x 1 per node
#   units U = G/m    2          accumulation A   1 per worker and step
#   steps            6          zero-weight      0 units per step (0.0 %)
#
# By hand, from this directory:
#   bash train.sh

set -euo pipefail
umask 077
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
TRNSLURM_JOB=local-$$ TRNSLURM_RESTARTS=0

# The attempt takes its number by creating its state file: only one can. Until trnslurm.node.attempt,
# started in the last line, keeps that file, a line that fails is recorded in it.
export TRNSLURM_PHASE=train TRNSLURM_ATTEMPT=1
until (set -o noclobber && : > "state/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT.json") 2> /dev/null; do
  [ -e "state/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT.json" ] ||
    { echo "error: cannot write in $PWD/state: check its owner, its mode and the disk" >&2; exit 1; }
  TRNSLURM_ATTEMPT=$((TRNSLURM_ATTEMPT + 1))
done
TRNSLURM_STARTED=$(date -u +%FT%TZ)
record() {  # STATE REASON EXIT_CODE ENDED
  { printf '{"job_id": "%s", "restarts": %d, ' "$TRNSLURM_JOB" "$TRNSLURM_RESTARTS"
    printf '"started": "%s", ' "$TRNSLURM_STARTED"
    printf '"state": "%s", "reason": "%s", "exit_code": %s, "ended": %s}\n' "$@"
  } > "state/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT.json"
}
failed() {  # the script ended before its last line, even by `exit 0`
  local code=$(($1 ? $1 : 1)) state=FAILED
  if [ "$code" -eq 143 ]; then state=CANCELLED; fi
  record "$state" "exit code $code while $TRNSLURM_DOING" "$code" "\"$(date -u +%FT%TZ)\""
  echo "$TRNSLURM_PHASE attempt $TRNSLURM_ATTEMPT: $state (exit code $code while $TRNSLURM_DOING)"
  exit "$code"
}
record STARTING '' null null
TRNSLURM_DOING='setting up the environment'
trap 'failed $?' EXIT
trap 'exit 143' TERM INT HUP
trap '' USR1                                # the time limit is near: there is nothing to save yet

# Environment: closed. The job sees only what is set here.
export USE_TORCH_XLA=0                      # torch_xla, where installed, would be chosen instead
export OMP_NUM_THREADS=1                    # many workers share the host: no thread pools on top
TRNSLURM_DEFAULT_PYTHON=python3
export TRNSLURM_PYTHON="${TRNSLURM_PYTHON:-$TRNSLURM_DEFAULT_PYTHON}"
export PYTHONPATH="$PWD/code"               # the snapshot: later edits of the source change nothing
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export TRNSLURM_RUN_DIR="$PWD" TRNSLURM_DEVICE=cpu
# From `neuron.env` and `env` of the recipe and the profile, which have the reasons:
export GREETING=hello
TRNSLURM_DOING="starting ${TRNSLURM_PYTHON//[\"\\]/?} on $(uname -n): is python: right, and code/ there?"
"$TRNSLURM_PYTHON" code/trnslurm/node/attempt.py --help > /dev/null  # the program exists, and this Python runs it

# Rendezvous: where the workers meet.
TRNSLURM_DOING='choosing the master address and ports'
TRNSLURM_HOSTS=local-0,local-1
MASTER_ADDR=127.0.0.1
# This script runs on the first node, so a port that is free here is free for the master.
TRNSLURM_PORTS=$("$TRNSLURM_PYTHON" -m trnslurm.node.ports "$TRNSLURM_JOB" "$TRNSLURM_ATTEMPT")
export TRNSLURM_HOSTS MASTER_ADDR MASTER_PORT="${TRNSLURM_PORTS% *}"

# Launch. This program keeps the state file and the heartbeat, takes TERM and USR1, has the workers save,
# requeues the job, gives it up, or starts again (this script in a child). It ends with srun's exit code.
exec "$TRNSLURM_PYTHON" -m trnslurm.node.attempt \
  --max-crashes=2 --hang-minutes=30 -- \
  "$TRNSLURM_PYTHON" -m trnslurm.node.local_srun --nodes 2 --tasks 1 \
  --output "logs/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT-node%n.log" \
  -- bash node.sh train
