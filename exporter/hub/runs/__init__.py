"""Jobs that gpujob launched: what their reports say, their budgets, and runs that were lost."""
