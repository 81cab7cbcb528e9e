"""What is trained on: which samples, in which order, cut into units."""
