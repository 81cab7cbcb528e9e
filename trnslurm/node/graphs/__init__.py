"""Graphs compiled before training: their content key, and the manifest that lists their files.

Standard library only, because the launcher and the programs on the nodes use it.
"""
