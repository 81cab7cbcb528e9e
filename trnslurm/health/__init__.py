"""Checks whether the cluster is fit for a job, and judges the results."""
