"""The collector protocol, metric families, and state saved over restarts."""
