"""The preflight: the nodes of a job check together that all are fit, before workers start."""
