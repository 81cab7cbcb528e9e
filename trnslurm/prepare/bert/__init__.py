"""From text to shards for BERT's pretraining: masked tokens and sentence pairs, in HDF5."""
