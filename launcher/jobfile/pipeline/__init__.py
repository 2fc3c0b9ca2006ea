"""The pipeline file: several jobs, each with its own job file."""
