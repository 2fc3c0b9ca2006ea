"""Logs of the workers: tails, patterns and packs, timestamps, errors, redaction."""
