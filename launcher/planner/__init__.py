"""From a specification to a plan: roles, topology, ports, Slurm options."""
