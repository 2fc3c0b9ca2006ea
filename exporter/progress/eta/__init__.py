"""ETA of a worker and its job, with an interval, and warnings for slowdowns and stalls."""
