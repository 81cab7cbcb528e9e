#!/bin/bash
# own on 2 x p4d.24xlarge, cluster p4d: one node's part
# Its environment comes from the batch script; its rank is known only here, inside the step.
set -euo pipefail
export TRNSLURM_PHASE=${1:?usage: node.sh precompile or node.sh train}
: "${SLURM_NODEID:?SLURM_NODEID is set by srun: this script is not for running by hand}"
: "${MASTER_ADDR:?}" "${MASTER_PORT:?}" "${TRNSLURM_PYTHON:?}"

echo "$(date -u +%FT%TZ) $TRNSLURM_PHASE: node $SLURM_NODEID of 2 on ${HOSTNAME:-?}," \
  "master $MASTER_ADDR:$MASTER_PORT"
if ! command -v "$TRNSLURM_PYTHON" > /dev/null; then
  echo "error: no Python at $TRNSLURM_PYTHON on ${HOSTNAME:-this node}:" \
    "set python: in the cluster profile" >&2
  exit 1
fi
if ! ulimit -n 65536 2> /dev/null; then     # collectives open a file per peer
  ulimit -n "$(ulimit -Hn)"
fi
ulimit -l "$(ulimit -Hl)"                   # EFA locks memory; Slurm before 23.02 may lower the soft limit
# Gloo would take the interface of this host's own name, often 127.0.0.1: name the right one.
GLOO_SOCKET_IFNAME=$("$TRNSLURM_PYTHON" -m trnslurm.node.interface "$MASTER_ADDR")
export GLOO_SOCKET_IFNAME
# PyTorch's flight recorder: if a collective times out, each worker writes the last 2,000 that it entered
# (0.4 MB), and triage compares the files to find who was missing. Before PyTorch 2.9 it read the second names.
TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}}"
TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-}}"
TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-$TRNSLURM_RUN_DIR/logs/$TRNSLURM_PHASE-$TRNSLURM_ATTEMPT-nccl-rank}"
export TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-$TORCH_FR_BUFFER_SIZE}"
TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$TORCH_FR_DUMP_TEMP_FILE}"
export TORCH_FR_DUMP_TEMP_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"

# Is every node fit for the job? All check together, in seconds; each problem names its node.
[ -n "${TRNSLURM_STANDBY:-}" ] ||           # beside a training, whose attempt has checked
"$TRNSLURM_PYTHON" -m trnslurm.node.preflight --device=cuda --devices=0 \
  --workers=8 --efa=4 --data=''
# Python begins with this directory's sitecustomize.py, for the stacks and the gate of its processes.
export PYTHONPATH="$TRNSLURM_RUN_DIR/code/trnslurm.zip/trnslurm/node/startup:$PYTHONPATH"

# Note what this node's devices, processors, memory and network do, until the work ends.
("$TRNSLURM_PYTHON" -m trnslurm.node.usage --task=$$ --node="$SLURM_NODEID" --seconds=10 &)

# On the first node, read the numbers of a script that does not report them, until it ends.
[ "$TRNSLURM_PHASE" != train ] || [ "$SLURM_NODEID" != 0 ] ||
("$TRNSLURM_PYTHON" -m trnslurm.node.numbers --task=$$ &)

# Watch this node's processes for a hang, until they end.
export TRNSLURM_NODE="$SLURM_NODEID"
("$TRNSLURM_PYTHON" -m trnslurm.node.lookout --task=$$ --minutes=30 &)

TRNSLURM_COMMAND=(
  "$TRNSLURM_PYTHON" -m accelerate.commands.launch --rdzv_backend=static --same_network
  --num_machines=2 --machine_rank="$SLURM_NODEID" --num_processes=16
  --main_process_ip="$MASTER_ADDR" --main_process_port="$MASTER_PORT"
  --multi_gpu --mixed_precision=no --dynamo_backend=no train.py --batch-size=2 --accum=2 --out 'out of '"$TRNSLURM_RUN_DIR"
)
# If the script sets no num_nodes, Lightning would use 1 and train on each node separately. Lightning
# reads these variables for a Trainer (pytorch/utilities/argparse.py) and Fabric (fabric/connector.py).
export PL_TRAINER_NUM_NODES=2 LT_NUM_NODES=2
if [ -n "$TRNSLURM_RESUME" ]; then          # the newest complete checkpoint
  TRNSLURM_COMMAND+=(--resume "$TRNSLURM_RESUME")
fi
# The script runs in a copy of its project, where relative paths mean the same.
TRNSLURM_COMMAND=(
  bash -c 'cd work && PYTHONPATH="$PWD:$PYTHONPATH" exec "$@"' bash "${TRNSLURM_COMMAND[@]}"
)
if [ -n "${TRNSLURM_STANDBY:-}" ]; then     # all of it, up to a gate at which the workers wait
  TRNSLURM_COMMAND=(
    "$TRNSLURM_PYTHON" -m trnslurm.node.standby --workers=8 -- "${TRNSLURM_COMMAND[@]}"
  )
fi
exec "${TRNSLURM_COMMAND[@]}"
