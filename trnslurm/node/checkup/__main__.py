"""python -m trnslurm.node.checkup: see program.py."""

import sys

from trnslurm.node.checkup.program import main

sys.exit(main())
