"""Sweeps: one job file, many jobs."""
