"""Why an attempt failed: the first failing rank in its records and logs, its cause and the fix.

Standard library only, and nothing else of ours: the launcher uses it, and the batch scripts.
"""
