"""`gpujob scan`: show the matches of patterns in logs."""
