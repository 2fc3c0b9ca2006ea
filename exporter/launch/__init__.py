"""Launch check and readiness, as a node sees them."""
