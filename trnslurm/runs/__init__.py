"""Run directories, and what became of the runs in them."""
