"""What a client accepts: formats and encodings of the page."""

from collections.abc import Iterator


def _choices(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, parameters and quality of each choice of an Accept header; an invalid quality counts as 0."""
    for part in header.split(","):
        name, *words = (word.strip() for word in part.split(";"))
        pairs = (word.partition("=") for word in words)
        parameters = {key.strip().lower(): value.strip() for key, _, value in pairs}
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            quality = 0.0
        yield name.lower(), parameters, quality


def wants_openmetrics(accept: str) -> bool:
    """Whether the Accept header prefers OpenMetrics 1.0 to the classic text format."""
    best: dict[str, float] = {}
    for kind, parameters, quality in _choices(accept):
        understood = kind != "application/openmetrics-text" or parameters.get("version", "1.0.0") == "1.0.0"
        best[kind] = max(best.get(kind, 0.0), quality if understood else 0.0)
    return best.get("application/openmetrics-text", 0.0) > max(best.get("text/plain", 0.0), 0.0)


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether the Accept-Encoding header allows gzip and does not prefer the plain page."""
    qualities = {name: quality for name, _, quality in _choices(accept_encoding)}
    gzip = qualities.get("gzip", qualities.get("*", 0.0))
    return gzip > 0.0 and gzip >= qualities.get("identity", 0.0)
