"""python -m trnslurm.node.attempt: see program.py."""

import sys

from trnslurm.node.attempt.program import main

sys.exit(main())
