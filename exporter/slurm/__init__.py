"""Slurm's queue and accounting, read only: commands, their text, states, and changes of tracked jobs."""
