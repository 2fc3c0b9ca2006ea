"""Values in, values out: no clock, no file, no logging. ``now`` is always an argument."""
