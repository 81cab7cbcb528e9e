"""Plans a job on a number of nodes: batch, sharding, memory, data and time."""
