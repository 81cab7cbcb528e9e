"""Proposes runs, puts bundles into run directories and starts them; resumes and cancels runs."""
