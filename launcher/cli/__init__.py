"""Commands of gpujob, one module per group."""
