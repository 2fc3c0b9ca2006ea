"""Alerts of a job and of a site: thresholds, and who is notified."""
