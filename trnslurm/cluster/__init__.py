"""What a cluster is used for outside a job: its Python, its nodes, its compile cache."""
