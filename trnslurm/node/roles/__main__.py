"""`python -m trnslurm.node.roles`."""

import sys

from trnslurm.node.roles.program import main

sys.exit(main(sys.argv[1:]))
