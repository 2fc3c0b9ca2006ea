"""Runs of experiment trackers, ended from outside after the program that opened them was killed."""
