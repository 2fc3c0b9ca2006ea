"""Errors that a command line answers with one message and exit status 2."""


class ExporterError(Exception):
    """Base of the errors that name their place, what was found and what would be right."""


class ManifestError(ExporterError):
    """The manifest is absent, unreadable or of an unknown schema version."""
