"""Starts trnslurm.mirror.program."""

import sys

from trnslurm.mirror.program import main

sys.exit(main())
