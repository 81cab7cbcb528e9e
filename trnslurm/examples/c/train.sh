#!/bin/bash
# Linear regression by several processes over TCP: no Python, no MPI, no library.
#
#     trnslurm submit ./train.sh --nodes 2 --launcher srun
#
# Every worker compiles train.c for its node, and becomes it.
set -eu
cc -O2 -Wall -o "train-$RANK" train.c -lm
exec "./train-$RANK"
