"""Collectors and page of the GPUs."""
