"""Recipes and cluster profiles: YAML in, frozen dataclasses out."""
