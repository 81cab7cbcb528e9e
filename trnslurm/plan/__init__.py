"""What a training needs on so many nodes: its batch, sharding, memory, data and time."""
