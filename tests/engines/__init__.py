"""Stand-ins for serving engines, routers and benchmarks: the real bodies and log lines, without a model.

They take the command lines of the programs that they stand for, ignore what means nothing to them, and use the
standard library alone, so that any ``python3`` runs them. ``faulty_embed.py`` is the example workload with faults.
"""
