"""Checkpoints: which are complete, how old they are, and when the next is due."""
