"""The text to prepare: its files, its documents, and the chunks that are processed."""
