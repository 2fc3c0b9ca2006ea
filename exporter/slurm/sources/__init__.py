"""Where the queue is from: Slurm's commands, slurmrestd, a hub, and one answer that commands share."""
