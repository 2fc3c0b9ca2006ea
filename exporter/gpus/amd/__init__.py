"""AMD GPUs, read by amdsmi."""
