"""BERT's pretraining data: HDF5 shards in the format of NVIDIA and AWS, read as they are."""

from trnslurm.train.shards.index import index_shards
from trnslurm.train.shards.reader import Samples, ShardedSamples

__all__ = ["Samples", "ShardedSamples", "index_shards"]
