"""Disks of the job: free space, quota, and when they will be full."""
