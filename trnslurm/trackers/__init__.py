"""Sends the metrics of runs to Weights & Biases, MLflow, or a plug-in's tracker."""
