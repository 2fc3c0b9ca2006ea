"""Any jobs of Slurm, followed to their ends: `gpujob track`."""
