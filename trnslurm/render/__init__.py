"""Makes a bundle of a job and the templates: the files that an admin reviews and Slurm runs."""
