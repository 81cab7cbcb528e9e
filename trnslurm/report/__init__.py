"""A page about runs: what they did, what it cost, and how they differ."""
