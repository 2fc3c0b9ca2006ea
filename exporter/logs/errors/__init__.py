"""Errors in logs: which line explains the end of a program."""
