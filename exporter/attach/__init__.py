"""Jobs that others have started: find their processes and files, and watch them."""
