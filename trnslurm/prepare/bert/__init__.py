"""From text to shards for BERT's pretraining: masked tokens and pairs of sentences, in HDF5."""
