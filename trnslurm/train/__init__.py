"""The training runtime that jobs import; it knows plan.json and nothing of the launcher."""
