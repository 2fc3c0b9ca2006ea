"""The page of the hub: series of jobs, sums, nodes and the hub itself."""
