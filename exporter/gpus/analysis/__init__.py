"""Pure calculations on GPU readings: health, hangs, attribution, Xid errors."""
