"""Files that a job writes: outputs, checkpoints, their disks, and file formats."""
