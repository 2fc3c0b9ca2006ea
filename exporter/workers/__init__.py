"""Worker processes: their runs, why they ended, and diagnosis."""
