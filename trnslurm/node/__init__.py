"""Owns the programs that rendered scripts call on a node: standard library only, self-contained."""
