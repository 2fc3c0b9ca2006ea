"""Node survey before the start, and readiness of services."""
