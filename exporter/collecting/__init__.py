"""The collector protocol, metric families, published values, and state saved over restarts."""
