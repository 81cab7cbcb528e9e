"""Checkpoints: complete or absent, written in the background, read on any number of workers.

    checkpoints/step-00000017/
        rank-00000-of-00004.safetensors   the rows of every tensor that worker 0 of 4 has
        …
        manifest.json                     written last: what it is, size and sha256 of each file

A tensor is stored under its parameter's name and its kind, such as
"exp_avg/transformer.wte.weight". Of its n rows, worker r of W has ceil(n / W), starting at row r *
ceil(n / W). The rows of the files, one after another in the order of the workers, are the tensor.

If a job brings its own optimizers, the manifest names an owner for each parameter. The owner's file
has the complete parameter and its state: tensors as "momentum/transformer…", and numbers in the
header.
"""
