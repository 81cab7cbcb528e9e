#!/bin/bash
# A program that is no Python: it says what it is given, and writes where it stands.
set -eu
echo "node $SLURM_NODEID of $SLURM_NNODES: $*" | tee "said-$SLURM_NODEID.txt"
