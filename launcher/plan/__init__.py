"""The plan of a job as a value, its placeholders, its ports and its container commands."""
