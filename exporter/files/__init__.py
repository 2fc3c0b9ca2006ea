"""Files that a job writes: results, checkpoints, the disks they lie on, and their formats."""
