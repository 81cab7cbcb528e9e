"""Random access to samples and tokens that other libraries wrote, on disk or in an object store."""
