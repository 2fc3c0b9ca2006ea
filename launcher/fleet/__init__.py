"""Jobs, nodes, use and metrics of a cluster, as tables and JSON."""
