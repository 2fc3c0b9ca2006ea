"""Search for many patterns in one pass."""
