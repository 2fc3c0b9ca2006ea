"""Verification: whether the results of a job are right."""
