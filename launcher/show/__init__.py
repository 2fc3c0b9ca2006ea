"""`gpujob plan`: the plan as text, picture and JSON."""
