"""Checkpoints as directories: written by all workers, committed by one rename, kept, and read.

    step-00000017/
        rank-00000-of-00004.safetensors   what worker 0 of 4 saves
        …
        manifest.json                     written last: size and sha256 of each file

The training runtime and trnslurm.save() write them. They use no collectives and no pickles.
"""
