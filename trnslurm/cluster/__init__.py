"""Uses a cluster outside a job: its Python, its nodes, its compile cache."""
