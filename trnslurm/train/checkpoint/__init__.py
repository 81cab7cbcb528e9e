"""Checkpoints: whole or not there, written in the background, read at any number of workers.

    checkpoints/step-00000017/
        rank-00000-of-00004.safetensors   the rows of every tensor that worker 0 of 4 has
        …
        manifest.json                     written last: what it is, size and sha256 of each file

A tensor is stored by its parameter's name and its kind, as "exp_avg/transformer.wte.weight". Of
its n rows worker r of W has ceil(n / W), from row r * ceil(n / W) on: the files' rows one after
another, in the order of workers, are the tensor.

Where a job brings its own optimizers, the manifest names an owner for each parameter: its file has
the parameter and its state whole, tensors as "momentum/transformer…", and numbers in its header.
"""
