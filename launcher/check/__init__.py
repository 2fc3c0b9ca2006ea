"""Preflight checks: inputs, modules, programs, and resources of the site."""
