"""Schedulers: what starts the jobs of runs, and knows what became of them."""
