"""What the launcher, the scripts, the node programs and the training code agree on.

These modules use only the standard library, because all of these programs import them.
"""
