"""Pipelines: several jobs that wait for each other."""
