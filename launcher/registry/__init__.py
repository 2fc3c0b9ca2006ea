"""The user's jobs by id, name and age, from any directory and node."""
