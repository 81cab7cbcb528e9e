#!/bin/bash
# bert_mrpc (tiny) on 2 x local, cluster local: precompile
# Written by trnslurm 0.1.0. Paths are relative to this directory, so these bytes
# can be reviewed, copied and submitted as they are.
#
#   global batch G   16         micro-batch m    4
#   workers W        2          = 2 x 1 per node
#   units U = G/m    4          accumulation A   2 per worker and step
#   steps            60         zero-weight      0 units per step (0.0 %)
#
# By hand, from this directory:
#   bash precompile.sh && bash train.sh

set -euo pipefail
umask 077
phase=precompile
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
job_id=local-$$
restarts=0

# State: small JSON files that outlive Slurm's memory (accounting is often off, and finished jobs
# are forgotten after MinJobAge). The attempt's number is taken by creating its file: only one can.
attempt=1
until (set -o noclobber && : > "state/$phase-$attempt.json") 2> /dev/null; do
  if [ ! -e "state/$phase-$attempt.json" ]; then
    echo "error: cannot write in $PWD/state: check its owner, its mode and the disk" >&2
    exit 1
  fi
  attempt=$((attempt + 1))
done
started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
state=STARTING
reason=
hosts=
doing='starting'
step=
launched=
heartbeat=

write_state() {  # replaces the file whole, so that a reader never sees half of it
  local ended=null
  case $state in STARTING | RUNNING) ;; *) ended="\"$(date -u +%Y-%m-%dT%H:%M:%SZ)\"" ;; esac
  {
    printf '{"phase": "%s", "attempt": %d, ' "$phase" "$attempt"
    printf '"job_id": "%s", "restarts": %d, ' "$job_id" "$restarts"
    printf '"state": "%s", "reason": "%s", "exit_code": %s, ' "$state" "$reason" "${1:-null}"
    printf '"hosts": "%s", "host": "%s", "pid": %d, ' "$hosts" "${HOSTNAME:-}" "$$"
    printf '"started": "%s", "ended": %s}\n' "$started" "$ended"
  } > "state/.$phase-$attempt.tmp"
  mv -f -- "state/.$phase-$attempt.tmp" "state/$phase-$attempt.json"
}

# shellcheck disable=SC2317,SC2329
finish() {  # reached by a trap: the last word on this attempt, however the script ends
  local code=$1
  trap '' TERM INT HUP USR1
  if [ -n "$heartbeat" ]; then kill "$heartbeat" 2> /dev/null || true; fi
  if [ "$code" -eq 0 ] && [ -z "$launched" ]; then
    code=1                                  # something left the script before it had done its work
  fi
  case $state in
    STARTING | RUNNING)
      if [ "$code" -eq 0 ]; then
        state=COMPLETED
      else
        state=FAILED reason="exit code $code while $doing"
      fi ;;
  esac
  write_state "$code"
  if [ -n "$launched" ] && { [ "$state" = FAILED ] || [ "${cause:-}" = crash ]; }; then
    "$TRNSLURM_PYTHON" -m trnslurm.node.triage . --phase "$phase" --attempt "$attempt" || true
  fi
  echo "$(date -u +%FT%TZ) $phase attempt $attempt: $state${reason:+ ($reason)}"
  exit "$code"
}
trap 'finish $?' EXIT

# shellcheck disable=SC2317,SC2329
on_term() {  # reached by a trap: scancel, the time limit, preemption and requeue all arrive as TERM
  trap '' TERM INT HUP USR1
  state=CANCELLED
  write_state
  if [ -n "$step" ]; then
    kill -TERM "$step" 2> /dev/null || true
    wait "$step" || true
  fi
  exit 143
}
trap on_term TERM INT HUP
if [ -e state/cancelled.json ]; then        # nothing brings a cancelled run back
  echo "error: this run was cancelled; remove state/cancelled.json to run it all the same" >&2
  state=CANCELLED reason='cancelled before it started'
  exit 1
fi
write_state

# Environment: closed. What the job sees is what stands here.
doing='setting up the environment'
default_python=python3
export TRNSLURM_PYTHON="${TRNSLURM_PYTHON:-$default_python}"
export PYTHONPATH="$PWD/code"               # the snapshot: later edits of the source change nothing
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export TRNSLURM_RUN_DIR="$PWD" TRNSLURM_PHASE="$phase" TRNSLURM_ATTEMPT="$attempt"
export TRNSLURM_DEVICE=xla-cpu
export USE_TORCH_XLA=0

# Graphs are compiled ahead, for a key of all that shapes them. It is measured here, because this
# Python's packages are part of it. The key's manifest in the cache says which files there must be.
doing='reading the key of the graphs'
export TRNSLURM_CACHE="$HOME/"trnslurm-runs/.compiled
export TRNSLURM_CACHE_LAYOUT=shared
export TRNSLURM_CACHE_TRUST=''             # compile_trust: users besides this one and root
TRNSLURM_GRAPH_KEY=$("$TRNSLURM_PYTHON" -m trnslurm.node.graphs key)
export TRNSLURM_GRAPH_KEY
code=0
"$TRNSLURM_PYTHON" -m trnslurm.node.graphs warm || code=$?
case $code in
  0) launched=yes; exit 0 ;;                # warm: there is nothing to do
  3) ;;                                     # cold
  *) exit "$code" ;;
esac

# Rendezvous: where the workers meet.
doing='choosing the master address and ports'
hosts=local-0,local-1
MASTER_ADDR=127.0.0.1
# This script runs on the first node, so a port that is free here is free for the master.
ports=$("$TRNSLURM_PYTHON" -m trnslurm.node.ports "$job_id" "$restarts")
export MASTER_ADDR MASTER_PORT="${ports% *}" TRNSLURM_HOSTS="$hosts"

# Launch. In the background, because bash runs a trap only while it waits.
doing="running on $hosts"
state=RUNNING
write_state
touch state/heartbeat                       # its age tells how long a silent job has been lost
(
  trap 'kill "$!" 2> /dev/null; exit 0' TERM
  while :; do sleep 30 & wait "$!"; touch state/heartbeat; done
) &
heartbeat=$!
"$TRNSLURM_PYTHON" -m trnslurm.node.local_srun --nodes 2 \
  --output "logs/$phase-$attempt-node%n.log" \
  -- bash node.sh "$phase" &
step=$!
code=0
wait "$step" || code=$?
if [ "$code" -eq 0 ]; then                  # every node has compiled: is no graph missing?
  doing='verifying the graphs'
  "$TRNSLURM_PYTHON" -m trnslurm.node.graphs commit || code=$?
fi
launched=yes
exit "$code"
