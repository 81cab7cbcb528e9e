"""Copies a run's checkpoints to S3; boto3 is the only package needed."""
