"""Models that are divided over workers: parameters, gradients and the optimizer's state.

Four strategies behind one interface: PyTorch's FSDP2, DeepSpeed's ZeRO-3 and torch_xla's FSDP over
all workers, and tensor parallelism within a node. All are driven by a job's own loop, and not by
the Trainer of Hugging Face: its gradients are wrong with torch_xla's FSDP (accelerate#3180), and
its accumulation knows no units of weight zero, with which the global batch stays exact at any
number of workers. All write and read the same checkpoints.
"""
