"""Run directories, and the outcomes of the runs in them."""
