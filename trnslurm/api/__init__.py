"""The library: what `import trnslurm` offers. The command line is built on it."""
