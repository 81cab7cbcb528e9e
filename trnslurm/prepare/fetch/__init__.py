"""What comes over the network: datasets and models from the Hub, and published files."""
