#!/bin/bash
# bert_pretrain (phase2) on 2 x trn1.32xlarge, cluster trn1: one node's part
# Its environment comes from the batch script; its rank is known only here, inside the step.
set -euo pipefail
phase=${1:?usage: node.sh precompile or node.sh train}
node_rank=${SLURM_NODEID:?SLURM_NODEID is set by srun: this script is not for running by hand}
: "${MASTER_ADDR:?}" "${MASTER_PORT:?}" "${TRNSLURM_PYTHON:?}"

echo "$(date -u +%FT%TZ) $phase: node $node_rank of 2 on ${HOSTNAME:-?}," \
  "master $MASTER_ADDR:$MASTER_PORT"
if ! command -v "$TRNSLURM_PYTHON" > /dev/null; then
  echo "error: no Python at $TRNSLURM_PYTHON on ${HOSTNAME:-this node}:" \
    "set python: in the cluster profile" >&2
  exit 1
fi
if ! ulimit -n 65536 2> /dev/null; then     # collectives open a file per peer
  ulimit -n "$(ulimit -Hn)"
fi
export OMP_NUM_THREADS=1                    # one worker per core: no threads on top
# Gloo would take the interface of this host's own name, often 127.0.0.1: name the right one.
interface=$(ip -o -4 addr show to "$MASTER_ADDR" | awk '{ print $2 }')
if [ -z "$interface" ]; then
  interface=$(ip -o route get "$MASTER_ADDR" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
fi
export GLOO_SOCKET_IFNAME="$interface"

# Is every node fit for the job? They find out together, in seconds; what is wrong is said by name.
"$TRNSLURM_PYTHON" -m trnslurm.node.preflight --device=neuron --devices=16 \
  --workers=32 --efa=8 --data=/fsx/trnslurm-data/bert_pretrain_wikicorpus_tokenized_hdf5_seqlen512

launch=(
  "$TRNSLURM_PYTHON" -m torch.distributed.run
  --nnodes=2 --node_rank="$node_rank" --nproc_per_node=32
  --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT"
  code/jobs/bert_pretrain/train.py plan.json
)
if [ "$phase" = precompile ]; then          # must be the outermost command of the trial run
  launch=(neuron_parallel_compile "${launch[@]}")
fi
if [ "$phase" = precompile ]; then          # its exit code may be 0 though graphs are missing
  launch=("$TRNSLURM_PYTHON" -m trnslurm.node.graphs compile -- "${launch[@]}")
else                                        # cold or damaged: refuse now, not in a collective
  "$TRNSLURM_PYTHON" -m trnslurm.node.graphs verify
fi
exec "${launch[@]}"
