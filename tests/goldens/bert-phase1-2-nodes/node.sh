#!/bin/bash
# bert_pretrain (phase1) on 2 x trn1.32xlarge, cluster trn1: one node's part
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
export NEURON_RT_ROOT_COMM_ID="$MASTER_ADDR:$TRNSLURM_DEVICE_PORT"  # the Neuron runtime's meeting point

# Is every node fit for the job? All check together, in seconds; each problem names its node.
[ -n "${TRNSLURM_STANDBY:-}" ] ||           # beside a training, whose attempt has checked
"$TRNSLURM_PYTHON" -m trnslurm.node.preflight --device=neuron --devices=16 \
  --workers=32 --efa=8 --data=/fsx/trnslurm-data/bert_pretrain_wikicorpus_tokenized_hdf5_seqlen128
# Python begins with this directory's sitecustomize.py, for the stacks and the gate of its processes.
export PYTHONPATH="$TRNSLURM_RUN_DIR/code/trnslurm.zip/trnslurm/node/startup:$PYTHONPATH"

# Note what this node's devices, processors, memory and network do, until the work ends.
("$TRNSLURM_PYTHON" -m trnslurm.node.usage --task=$$ --node="$SLURM_NODEID" --seconds=10 &)

# Watch this node's processes for a hang, until they end.
export TRNSLURM_NODE="$SLURM_NODEID"
("$TRNSLURM_PYTHON" -m trnslurm.node.lookout --task=$$ --minutes=30 &)

TRNSLURM_COMMAND=(
  "$TRNSLURM_PYTHON" -m trnslurm.node.launcher --workers=32 --
  code/jobs/bert_pretrain/train.py plan.json
)
if [ "$TRNSLURM_PHASE" = precompile ]; then          # must be the outermost command of the trial run
  TRNSLURM_COMMAND=(neuron_parallel_compile "${TRNSLURM_COMMAND[@]}")
fi
if [ -n "${TRNSLURM_STANDBY:-}" ]; then     # all of it, up to a gate at which the workers wait
  TRNSLURM_COMMAND=(
    "$TRNSLURM_PYTHON" -m trnslurm.node.standby --workers=32 -- "${TRNSLURM_COMMAND[@]}"
  )
fi
if [ "$TRNSLURM_PHASE" = precompile ]; then          # its exit code may be 0 though graphs are missing
  TRNSLURM_COMMAND=("$TRNSLURM_PYTHON" -m trnslurm.node.graphs compile -- "${TRNSLURM_COMMAND[@]}")
elif [ -z "${TRNSLURM_STANDBY:-}" ]; then    # missing or damaged: refuse now, not in a collective
  "$TRNSLURM_PYTHON" -m trnslurm.node.graphs verify
fi
exec "${TRNSLURM_COMMAND[@]}"
