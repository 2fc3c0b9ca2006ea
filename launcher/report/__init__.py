"""The final report: how the job went, and why."""
