"""Sends the metrics of runs to Weights & Biases or MLflow."""
