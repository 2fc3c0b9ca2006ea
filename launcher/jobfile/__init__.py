"""Job and cluster files, from YAML to checked specifications. The only package that imports pydantic."""
