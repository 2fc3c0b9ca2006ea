"""HTTP of the hub: listeners, handlers and JSON."""
