"""Small programs that run inside a job: wrapper, supervisor, and their helpers. Standard library only."""
