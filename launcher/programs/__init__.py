"""Small programs inside a job: wrapper, supervisor and their helpers. Standard library only."""
