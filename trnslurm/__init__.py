"""trnslurm: multi-node training jobs on Slurm, for AWS Trainium first."""

__version__ = "0.1.0"
