"""The gate of a user's own stack."""
