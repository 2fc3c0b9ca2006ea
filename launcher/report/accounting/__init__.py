"""Slurm's accounting of an ended job, in its report."""
