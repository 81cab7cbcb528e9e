"""Graphs compiled ahead: the key of what shapes them, and the manifest that says they are whole.

Standard library only: the launcher uses it, and programs on the nodes.
"""
