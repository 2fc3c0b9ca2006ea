"""Verification: whether the results of a job are complete and valid."""
