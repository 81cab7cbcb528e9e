# Sourced by the small stand-ins of Slurm's commands beside it: each call is written down below
# $TRNSLURM_FAKE_SLURM, and files there tell a stand-in to refuse or to hang.
# shellcheck shell=bash
set -euo pipefail
state=${TRNSLURM_FAKE_SLURM:?}
name=${name:-${0##*/}}

number=1
until mkdir "$state/calls/$name-$number" 2> /dev/null; do number=$((number + 1)); done
call=$state/calls/$name-$number
printf '%s\0' "$name" "$@" > "$call/argv"
env -0 > "$call/environ"
pwd > "$call/cwd"
echo "$name-$number" >> "$state/order"

# <name>.<what> for every call of a command, <name>-<number>.<what> for one of them.
for key in "$name" "$name-$number"; do
  if [ -e "$state/$key.hang" ]; then
    touch "$call/hanging"
    exec sleep 600
  fi
  if [ -e "$state/$key.stderr" ]; then
    cat "$state/$key.stderr" >&2
    exit 1
  fi
done
