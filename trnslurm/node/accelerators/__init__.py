"""Asks a node's accelerators: are they there, do they work, what do they do?"""
