"""The commands of gpujob, one file for each group."""
