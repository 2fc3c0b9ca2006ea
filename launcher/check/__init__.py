"""Checks before the launch: inputs, modules, programs, and what the site offers."""
