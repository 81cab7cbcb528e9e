"""BERT's pretraining data: HDF5 shards in the format of NVIDIA and AWS, read as they are."""

from trnslurm.train.data.shards.index import ShardSplit
from trnslurm.train.data.shards.reader import Samples, ShardedSamples, open_shards

__all__ = ["Samples", "ShardSplit", "ShardedSamples", "open_shards"]
