"""Commands about the jobs, nodes and hours of a whole cluster."""
