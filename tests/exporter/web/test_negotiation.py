"""Choices of clients between formats and encodings."""

import pytest

from exporter.web.negotiation import accepts_gzip, wants_openmetrics

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text", True),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.2", False),
        ("application/openmetrics-text;version=1.0.0;q=0", False),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.5", False),
        ("application/openmetrics-text;q=high", False),
        ("application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
    ],
)
def test_openmetrics_is_sent_to_clients_that_prefer_it(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted


@pytest.mark.parametrize(
    ("accept_encoding", "accepted"),
    [
        ("gzip", True),
        ("gzip, deflate, br, zstd", True),
        ("GZIP;q=0.5", True),
        ("*", True),
        ("br;q=1, *;q=0.1", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("*;q=0", False),
        ("", False),
        ("identity", False),
        ("identity, gzip;q=0.5", False),
        ("gzip;q=much", False),
        ("not-gzip", False),
        ("deflate, br", False),
    ],
)
def test_gzip_is_sent_to_clients_that_accept_it(accept_encoding: str, accepted: bool) -> None:
    assert accepts_gzip(accept_encoding) is accepted
