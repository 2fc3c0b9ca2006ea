"""Whose next scrape a sidecar awaits at the end of its job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.sidecar.scrape_log import ScrapeLog


def scraped(*times: float, announced: bool = False, known: bool = False) -> ScrapeLog:
    """A log that starts at 0, with scrapes of one client at these times."""
    log = ScrapeLog(0.0, announced=announced)
    for time in times:
        log.record("a", time, is_known=known)
    return log


def test_nobody_is_awaited_after_a_single_scrape_without_credentials() -> None:
    assert scraped().is_satisfied(100.0, 100.0)
    assert scraped(99.9).is_satisfied(100.0, 100.0)
    assert not scraped(99.9, known=True).is_satisfied(100.0, 100.0)


def test_who_scrapes_again_and_again_is_awaited_for_two_intervals() -> None:
    log = scraped(80.0, 95.0)
    assert not log.is_satisfied(100.0, 124.9)
    assert log.is_satisfied(100.0, 125.0)
    log.record("a", 110.0)
    assert log.is_satisfied(100.0, 110.0)


def test_all_awaited_scrapers_must_have_the_final_values() -> None:
    log = scraped(75.0, 90.0)
    log.record("b", 95.0, is_known=True)
    log.record("c", 96.0)
    log.record("a", 105.0)
    assert not log.is_satisfied(100.0, 106.0)
    log.record("b", 107.0, is_known=True)
    assert log.is_satisfied(100.0, 107.0)


@pytest.mark.parametrize("times", [(10.0,), (-1000.0, 10.0)])
def test_a_scraper_that_stopped_long_ago_does_not_count(times: tuple[float, ...]) -> None:
    log = scraped(*times, known=len(times) == 1)
    assert not log.is_satisfied(100.0, 10.0 + ScrapeLog.RECENT_S - 1)
    assert log.is_satisfied(100.0, 10.0 + ScrapeLog.RECENT_S)


def test_an_announced_job_waits_half_a_minute_for_the_first_scrape() -> None:
    assert not scraped(announced=True).is_satisfied(10.0, 29.9)
    assert scraped(announced=True).is_satisfied(10.0, 30.0)


def test_an_announced_job_waits_for_the_second_scrape_of_its_prometheus() -> None:
    log = scraped(25.0, announced=True)
    assert not log.is_satisfied(31.0, 39.9)
    log.record("a", 40.0)
    assert log.is_satisfied(31.0, 40.0)


def test_one_scrape_of_an_announced_job_later_is_nobodys_claim() -> None:
    assert scraped(25.0, announced=True).is_satisfied(31.0, ScrapeLog.SECOND_SCRAPE_S)
    assert scraped(ScrapeLog.SECOND_SCRAPE_S, announced=True).is_satisfied(60.0, 60.0)


@given(interval=st.floats(1.0, 60.0), first=st.floats(0.0, 60.0), scrapes=st.integers(2, 20), end=st.floats(0.01, 0.99))
def test_a_regular_scraper_always_gets_the_final_values(
    interval: float, first: float, scrapes: int, end: float
) -> None:
    times = [first + interval * number for number in range(scrapes)]
    since = times[-1] + interval * end
    log = scraped(*times)
    assert not log.is_satisfied(since, times[-1] + interval)
    log.record("a", times[-1] + interval)
    assert log.is_satisfied(since, times[-1] + interval)


@given(apart=st.floats(0.01, 14.99), end=st.floats(0.01, 14.99), cycles=st.integers(2, 5))
def test_two_servers_with_one_address_are_awaited_too(apart: float, end: float, cycles: int) -> None:
    times = sorted(15.0 * number + shift for number in range(cycles + 1) for shift in (0.0, apart))
    since = 15.0 * (cycles - 1) + end
    log = scraped(*(time for time in times if time <= since))
    upcoming = next(time for time in times if time > since)
    assert not log.is_satisfied(since, upcoming)


def test_two_servers_with_one_address_are_awaited_from_their_first_scrapes_of_an_announced_job() -> None:
    log = scraped(25.0, 26.0, announced=True)
    assert not log.is_satisfied(31.0, 39.9)


def test_many_strangers_do_not_displace_a_scraper_and_are_not_kept() -> None:
    log = scraped(80.0, 95.0)
    for number in range(10 * ScrapeLog.MOST_SCRAPERS):
        log.record(f"{number} {'x' * 8000}", 96.0)
    assert not log.is_satisfied(100.0, 101.0)
    assert len(log._scrapers) <= ScrapeLog.MOST_SCRAPERS
    assert all(len(name) <= ScrapeLog.MOST_NAME for name in log._scrapers)
