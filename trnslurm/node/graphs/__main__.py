"""python -m trnslurm.node.graphs: see program.py."""

import sys

from trnslurm.node.graphs.program import main

sys.exit(main())
