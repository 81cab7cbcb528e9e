"""Proposes runs, puts bundles into run directories and starts them. Resumes and cancels runs."""
