"""What launcher and exporter share: manifest, files of the run directory, events, names, clock. Standard library."""
