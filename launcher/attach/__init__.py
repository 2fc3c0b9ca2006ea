"""Jobs that others started: prepares their sidecars and writes their reports."""
