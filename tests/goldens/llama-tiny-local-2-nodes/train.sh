#!/bin/bash
# llama3_clm (tiny) on 2 x local, cluster local: train
# Written by trnslurm 0.1.0. Paths are relative to this directory, so these bytes
# can be reviewed, copied and submitted as they are.
#
#   global batch G   8          micro-batch m    1
#   workers W        2          = 2 x 1 per node
#   units U = G/m    8          accumulation A   4 per worker and step
#   steps            30         zero-weight      0 units per step (0.0 %)
#
# By hand, from this directory:
#   bash train.sh

set -euo pipefail
umask 077
phase=train
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
cause=                                      # what ended it, as trnslurm.node.ending names it
stop_file=state/stop-$phase-$attempt.json   # asks the workers to save and end
checkpoint=0                                # the step of the newest one when this attempt began
for path in checkpoints/step-*; do
  if [[ $path =~ /step-([0-9]{8})$ ]]; then checkpoint=$((10#${BASH_REMATCH[1]})); fi
done

write_state() {  # replaces the file whole, so that a reader never sees half of it
  local ended=null
  case $state in STARTING | RUNNING) ;; *) ended="\"$(date -u +%Y-%m-%dT%H:%M:%SZ)\"" ;; esac
  {
    printf '{"phase": "%s", "attempt": %d, ' "$phase" "$attempt"
    printf '"job_id": "%s", "restarts": %d, ' "$job_id" "$restarts"
    printf '"state": "%s", "reason": "%s", "exit_code": %s, ' "$state" "$reason" "${1:-null}"
    printf '"cause": "%s", "checkpoint": %d, ' "$cause" "$checkpoint"
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
ask_to_stop() {  # the first worker looks for this file; then all save, and end together
  printf '{"cause": "%s", "time": %d}\n' "$1" "$(date +%s)" > "state/.stop-$phase-$attempt.tmp"
  mv -f -- "state/.stop-$phase-$attempt.tmp" "$stop_file"
}

# shellcheck disable=SC2317,SC2329
on_usr1() {  # reached by a trap: the time limit is near, or trnslurm cancel asks
  if [ -e state/cancelled.json ]; then ask_to_stop cancelled; else ask_to_stop 'time limit'; fi
}
trap on_usr1 USR1

# shellcheck disable=SC2317,SC2329
on_term() {  # reached by a trap: scancel, the time limit, preemption and requeue all arrive as TERM
  trap '' TERM INT HUP USR1
  state=CANCELLED
  ask_to_stop terminated
  write_state
  if [ -n "$step" ]; then kill -TERM "$step" 2> /dev/null || true; fi
  if [ -n "$step" ]; then return 0; fi      # to until_ended, which waits for the workers to save
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
export TRNSLURM_DEVICE=cpu

# Rendezvous: where the workers meet.
doing='choosing the master address and ports'
hosts=local-0,local-1
MASTER_ADDR=127.0.0.1
# This script runs on the first node, so a port that is free here is free for the master.
ports=$("$TRNSLURM_PYTHON" -m trnslurm.node.ports "$job_id" "$restarts")
export MASTER_ADDR MASTER_PORT="${ports% *}" TRNSLURM_HOSTS="$hosts"

until_ended() {  # a trap ends `wait` early, but bash keeps the exit code of what ended meanwhile
  while kill -0 "$step" 2> /dev/null; do wait "$step" || true; done
  code=0
  wait "$step" || code=$?
}

conclude() {  # what this attempt was, and what follows
  local verdict
  verdict=$("$TRNSLURM_PYTHON" -m trnslurm.node.ending end \
    --attempt "$attempt" --exit-code "$code" --max-crashes 3) || verdict=
  if [ -z "$verdict" ]; then                # then the exit code, and what Slurm said, must do
    if [ "$code" -eq 0 ]; then code=1 doing='deciding how it ended'; fi
    return
  fi
  {
    read -r state
    read -r reason
    read -r cause
  } <<< "$verdict"
  if [ "$state" != COMPLETED ] && [ "$cause" != crash ]; then
    code=143                                # also if it ended well: what waits for it may not start
  fi
}

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
until_ended
launched=yes
if [ "$code" -ne 0 ] || [ -e "$stop_file" ]; then conclude; fi
exit "$code"
