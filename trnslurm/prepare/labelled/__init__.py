"""Rows of text with labels, from CSV, JSON or tables, to the samples that classifiers train on."""
