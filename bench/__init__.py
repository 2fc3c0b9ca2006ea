"""Measurements: ratios within one run and CPU by the kernel's own clocks, since the machine is shared."""
