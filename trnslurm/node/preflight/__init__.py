"""Whether all nodes are fit for a job: they find out together, before its workers start."""
