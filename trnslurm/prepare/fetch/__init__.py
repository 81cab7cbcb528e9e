"""What comes over the network: datasets and models of the Hub, and published files."""
