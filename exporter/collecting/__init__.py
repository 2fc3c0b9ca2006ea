"""What a collector is, the families it declares, and state kept over restarts."""
