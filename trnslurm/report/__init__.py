"""A page about runs: what they did, what they cost, and how they differ."""
