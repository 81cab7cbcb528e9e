"""Exports a checkpoint to a Hugging Face folder."""
