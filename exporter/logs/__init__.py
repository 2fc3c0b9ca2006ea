"""Logs of the workers: following them, patterns and packs, timestamps, errors, redaction."""
