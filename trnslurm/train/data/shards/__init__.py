"""BERT's pretraining data: HDF5 shards in the format of NVIDIA and AWS."""
