"""Programs that rendered scripts run on a node: standard library only, self-contained."""
