"""Checkpoints: which are complete, how old they are, and how many more fit."""
