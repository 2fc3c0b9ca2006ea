"""`gpujob watch`: the state of a job in the terminal."""
