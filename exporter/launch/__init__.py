"""Launch check and readiness of one node."""
