"""What nodes find out about themselves: the preflight before workers start, and the checkup."""
