"""The hub: all jobs of a user or a cluster, followed to their ends, as series, JSON and scrape targets."""
