"""The training data: which samples, in which order, divided into units."""
