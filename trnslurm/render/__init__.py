"""Renders a job into a bundle with the templates: the files that an admin reviews."""
