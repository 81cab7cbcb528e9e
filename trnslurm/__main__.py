"""`python -m trnslurm`."""

from trnslurm.cli import main

main()
