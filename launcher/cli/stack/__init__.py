"""The command `gpujob stack` and its parts."""
