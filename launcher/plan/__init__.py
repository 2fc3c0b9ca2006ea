"""The plan of a job as a value: placeholders, ports, container words."""
