"""From rows with labels in CSV, JSON or tables to the samples that classifiers train on."""
