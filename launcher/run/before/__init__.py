"""Before the workers start: surveys of nodes, and polling for readiness."""
