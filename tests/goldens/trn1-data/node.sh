#!/bin/bash
# Data of gpt2_zero1 (xl), cluster trn1
# Its environment comes from the batch script. A second start resumes where the first was stopped.
set -euo pipefail
: "${TRNSLURM_PYTHON:?}"

echo "$(date -u +%FT%TZ) preparing data on ${HOSTNAME:-?}"
if ! command -v "$TRNSLURM_PYTHON" > /dev/null; then
  echo "error: no Python at $TRNSLURM_PYTHON on ${HOSTNAME:-this node}:" \
    "set python: in the cluster profile" >&2
  exit 1
fi

TRNSLURM_COMMAND=(
  "$TRNSLURM_PYTHON" -m trnslurm.prepare
  --output=/fsx/trnslurm-data/wikitext-103
  --dataset=/fsx/trnslurm-data/hub/Salesforce--wikitext--wikitext-103-raw-v1--gpt2
  --tokenizer=/fsx/trnslurm-data/hub/Salesforce--wikitext--wikitext-103-raw-v1--gpt2
  '--document-start=^ = [^=].* = $'
  --processes=32
)
exec "${TRNSLURM_COMMAND[@]}"               # it handles TERM itself, and keeps finished pieces
