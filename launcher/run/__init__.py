"""The orchestrator: stages, tasks, signals, and the end of a job."""
