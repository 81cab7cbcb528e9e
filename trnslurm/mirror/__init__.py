"""Copies of a run's checkpoints in S3; boto3 is the only package that it needs."""
