"""The run directory, the only memory of a job."""
