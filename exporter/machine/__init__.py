"""Linux as a sidecar sees it: /proc, cgroups, kernel log, mounts, and files that may hang."""
