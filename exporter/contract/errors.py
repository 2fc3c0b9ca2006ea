"""Errors that a command reports in one message, with exit status 2."""


class ExporterError(Exception):
    """Base of errors that name the place, what was found and what would be right."""


class ManifestError(ExporterError):
    """A manifest that is absent, unreadable or of an unknown schema version."""
