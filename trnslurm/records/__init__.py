"""What a run directory says: what was submitted, by whom, and what its attempts wrote."""
