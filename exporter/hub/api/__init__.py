"""HTTP of the hub: entrances, handlers and JSON."""
