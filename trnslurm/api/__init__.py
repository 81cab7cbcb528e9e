"""The library: what `import trnslurm` offers; the command line is built on it."""
