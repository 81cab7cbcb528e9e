"""What runs say of their steps, sent to Weights & Biases or MLflow."""
