"""The library: what `import trnslurm` offers, on which the command line sits."""
