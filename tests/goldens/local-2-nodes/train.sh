#!/bin/bash
# gpt2_zero1 (tiny) on 2 x local, cluster local: train
# Written by trnslurm 0.1.0. Paths are relative to this directory, so these bytes
# can be reviewed, copied and submitted as they are.
#
#   global batch G   8
#   micro-batch m    1
#   steps            30
#
#   W = nodes x workers per node        2 = 2 x 1
#   A = ceil(G / (m x W))               4 = ceil(8 / (1 x 2))
#   zero-weight = A x W - G / m         0 = 4 x 2 - 8 / 1, 0.0 % of a step's micro-batches
#   on    1 2 3 4 8  nodes
#   A is  8 4 3 2 1  micro-batches per worker and step
#
# By hand, from this directory:
#   bash precompile.sh && bash train.sh

set -euo pipefail
umask 077
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
TRNSLURM_JOB=local-$$ TRNSLURM_RESTARTS=0

# --- Attempt. It takes its number by creating its state file: only one can. Until trnslurm.node.attempt,
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

# --- Environment: closed. The job sees only what is set here.
# --- Device
export TF_CPP_MIN_LOG_LEVEL=2               # else each cached graph warns that a CPU compiles it again
export OMP_NUM_THREADS=1                    # many workers share the host: no thread pools on top
# --- The run: its Python, its code, where it keeps what it makes
TRNSLURM_DEFAULT_PYTHON=python3
export TRNSLURM_PYTHON="${TRNSLURM_PYTHON:-$TRNSLURM_DEFAULT_PYTHON}"
export PYTHONPATH="$PWD/code/trnslurm.zip:$PWD/code"  # the snapshot: later edits of the source change nothing
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export TRNSLURM_RUN_DIR="$PWD" TRNSLURM_DEVICE=xla-cpu
export TRNSLURM_CACHE="$HOME/"trnslurm-runs/.compiled  # compiled graphs, and their manifests
export TRNSLURM_CACHE_LAYOUT=shared  # compile_layout: one for all hosts, or a part for each
export TRNSLURM_CACHE_TRUST=''             # compile_trust: users besides this one and root
# --- `neuron.env` and `env` of the recipe and the profile, which have the reasons
TRNSLURM_DOING="starting ${TRNSLURM_PYTHON//[\"\\]/?} on $(uname -n): is python: right, and code/ there?"
"$TRNSLURM_PYTHON" -m trnslurm.node.attempt --help > /dev/null  # the program exists, and this Python runs it

# --- Rendezvous: where the workers meet. srun gives each node its rank, $SLURM_NODEID: node.sh passes it on.
TRNSLURM_DOING='choosing the master address and ports'
TRNSLURM_HOSTS=local-0,local-1
MASTER_ADDR=127.0.0.1
# This script runs on the first node, so a port that is free here is free for the master.
TRNSLURM_PORTS=$("$TRNSLURM_PYTHON" -m trnslurm.node.ports "$TRNSLURM_JOB" "$TRNSLURM_ATTEMPT")
export TRNSLURM_HOSTS MASTER_ADDR MASTER_PORT="${TRNSLURM_PORTS% *}" TRNSLURM_DEVICE_PORT="${TRNSLURM_PORTS#* }"

# --- Launch: node.sh on each node. trnslurm.node.attempt keeps the state file and the heartbeat, takes
# TERM and USR1, has the workers save, requeues the job, gives it up, or starts again (this script in a
# child). It ends with srun's exit code.
exec "$TRNSLURM_PYTHON" -m trnslurm.node.attempt \
  --graphs --max-crashes=3 --hang-minutes=30 -- \
  "$TRNSLURM_PYTHON" -m trnslurm.node.local_srun --nodes 2 --tasks 1 \
  --output "logs/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT-node%n.log" \
  -- bash node.sh train
