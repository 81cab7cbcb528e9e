"""Is the cluster fit for a job? What checks its nodes, and what the results mean."""
