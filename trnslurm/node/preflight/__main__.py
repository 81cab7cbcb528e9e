"""python -m trnslurm.node.preflight: see program.py."""

import os
import sys

from trnslurm.node.preflight.program import main

code = main()
sys.stdout.flush()
os._exit(code)  # does not wait for a check that hangs
