"""The contents of a run directory: what was submitted, by whom, and what its attempts wrote."""
