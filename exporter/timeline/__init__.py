"""The timeline of a node: a bounded history of its series, for jobs that no Prometheus scrapes."""
