"""Samples and tokens that other libraries wrote, read at random, from here or an object store."""
