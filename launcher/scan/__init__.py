"""`gpujob scan`: what the patterns find in a log."""
