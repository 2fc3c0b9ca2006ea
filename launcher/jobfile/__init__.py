"""YAML to a checked specification. The only room that imports pydantic."""
