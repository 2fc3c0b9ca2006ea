"""What other programs read: the timelines of a job as OpenMetrics."""
