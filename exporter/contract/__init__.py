"""Shared by launcher and exporter: manifest, run directory files, events, names, clock. Standard library only."""
