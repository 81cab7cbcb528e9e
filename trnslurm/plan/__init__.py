"""Plans a job for a number of nodes: batch, sharding, memory, data and time."""
