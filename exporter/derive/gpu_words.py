"""What all that tells of GPUs says alike."""

GIB = 1 << 30
STATE_WORDS = {"lost": "is lost", "reset_required": "needs a reset", "hanging": "does not answer"}
"""Of a device that is not ok, after its name."""
