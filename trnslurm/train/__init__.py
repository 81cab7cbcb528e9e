"""The training runtime that jobs import. It reads plan.json and does not know the launcher."""
