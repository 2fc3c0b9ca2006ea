"""Commands on jobs that exist."""
