"""Models that are divided over workers: parameters, gradients and the optimizer's state.

There are four strategies behind one interface: over all workers, PyTorch's FSDP2, DeepSpeed's
ZeRO-3 and torch_xla's FSDP; and tensor parallelism within a node. All are driven by a job's own
loop, not by the Hugging Face Trainer: its gradients are wrong with torch_xla's FSDP
(accelerate#3180), and its accumulation has no units of weight zero, which keep the global batch
exact for any number of workers. All strategies write and read the same checkpoints.
"""
