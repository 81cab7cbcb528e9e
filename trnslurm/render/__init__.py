"""From a job and the templates to a bundle: the files that an admin reviews and Slurm runs."""
