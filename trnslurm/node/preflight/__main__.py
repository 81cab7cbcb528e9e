"""python -m trnslurm.node.preflight: see program.py."""

import os
import sys

from trnslurm.node.preflight.program import main

code = main()
sys.stdout.flush()
os._exit(code)  # a check that hangs must not keep us
