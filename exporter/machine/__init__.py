"""Readers of Linux: /proc, cgroups, kernel log, mounts, and files that may hang."""
