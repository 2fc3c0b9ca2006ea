"""Attached jobs: find their processes and files, and watch them."""
