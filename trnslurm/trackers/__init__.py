"""Sends the metrics of runs to Weights & Biases, MLflow, or the tracker of a plug-in."""
