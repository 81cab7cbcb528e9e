"""What the launcher, the scripts, the programs on the nodes and the training agree on.

Standard library only, for all of them import these modules.
"""
