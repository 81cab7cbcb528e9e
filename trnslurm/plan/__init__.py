"""What a training will be on so many nodes: its batch, its sharding, its memory, its data."""
