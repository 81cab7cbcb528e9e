"""Queries a node's accelerators: whether they are present, whether they work, and what they do."""
