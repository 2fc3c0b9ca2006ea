"""The command `gpujob alerts` and its parts."""
