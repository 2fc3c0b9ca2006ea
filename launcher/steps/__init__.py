"""Starting tasks: batch script, srun command lines, local processes, and the Slurm queue."""
