"""The event loop of the hub's web server waits for nothing that may hang."""

import asyncio
import os
import pwd
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from exporter.hub.api import service as hub_service
from exporter.hub.api.service import HubService
from exporter.hub.registry_reader import RegistryReader
from exporter.slurm.commands_reader import ClusterFacts
from tests.exporter.hub.made_up_slurm import queue_row
from tests.exporter.hub.test_engine import Hub
from tests.support.exporter import SOON_S

OTHER_UID = 4711


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub(tmp_path, whole_cluster=True)
    made.slurm.rows = [queue_row("7", "RUNNING", started=110.0)]
    made.slurm.facts = ClusterFacts("c1", hides_jobs=True)
    made.steps(5)
    yield made
    made.close()


@pytest.fixture
def service(hub: Hub) -> HubService:
    assert hub.store is not None
    registry = RegistryReader([], only_own=False)
    return HubService(hub.engine, hub.store, registry, own_uid=os.geteuid(), whole_cluster=True)


def test_a_scrape_shows_the_size_of_the_file_without_a_look_at_it(
    hub: Hub, service: HubService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.store is not None
    size = hub.store.size_bytes()
    monkeypatch.setattr(type(hub.store), "size_bytes", lambda _: pytest.fail("its file system may hang"))
    answer = asyncio.run(service._metrics(make_mocked_request("GET", "/metrics")))
    assert isinstance(answer.body, bytes)
    assert f'gpujob_hub_store_bytes{{cluster="c1"}} {size}\n' in answer.body.decode()


def test_usage_that_slurm_hides_limits_users_to_their_jobs_and_not_the_hub(
    hub: Hub, service: HubService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="eve"))

    async def ask(facts: ClusterFacts) -> tuple[str | None, bool]:
        hub.slurm.facts = facts
        hub.steps(700)
        viewer = await service._viewer_of(OTHER_UID)
        assert viewer is not None
        return viewer.user, "without operator rights" in caplog.text

    async def ask_each() -> list[tuple[str | None, bool]]:
        hidden = ClusterFacts("c1", False), ClusterFacts("c1", False, hides_usage=True), ClusterFacts("c1", True)
        return [await ask(facts) for facts in hidden]

    assert asyncio.run(ask_each()) == [(None, False), ("eve", False), ("eve", True)]


def test_the_loop_does_not_wait_for_the_name_of_a_user_and_asks_once(
    service: HubService, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, asked = threading.Event(), list[int]()

    def find_slowly(uid: int) -> SimpleNamespace:
        asked.append(uid)
        assert may_answer.wait(SOON_S), "the loop waits for the directory service"
        return SimpleNamespace(pw_name="eve")

    monkeypatch.setattr(pwd, "getpwuid", find_slowly)
    monkeypatch.setattr(hub_service, "USER_WAIT_S", 2 * SOON_S)

    async def ask() -> list[str | None]:
        first = asyncio.create_task(service._viewer_of(OTHER_UID))
        while not asked:
            await asyncio.sleep(0.01)
        may_answer.set()
        viewers = [await first, await service._viewer_of(OTHER_UID)]
        return [viewer.user for viewer in viewers if viewer is not None]

    assert asyncio.run(ask()) == ["eve", "eve"]
    assert asked == [OTHER_UID]


def test_a_hanging_directory_service_stops_neither_scrapes_nor_the_answers_to_known_users(
    service: HubService, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()

    def find(uid: int) -> SimpleNamespace:
        if uid != OTHER_UID:
            may_answer.wait(2 * SOON_S)
        return SimpleNamespace(pw_name=f"user{uid}")

    monkeypatch.setattr(pwd, "getpwuid", find)
    monkeypatch.setattr(hub_service, "USER_WAIT_S", 2 * SOON_S)

    async def ask() -> tuple[str | None, int]:
        await service._viewer_of(OTHER_UID)
        monkeypatch.setattr(hub_service, "USER_WAIT_S", 0.05)
        uids = [uid for uid in range(5000, 5004) for _ in range(20)]
        try:
            answers = await asyncio.wait_for(
                asyncio.gather(*map(service._viewer_of, uids), return_exceptions=True), timeout=SOON_S
            )
            assert all(isinstance(answer, web.HTTPServiceUnavailable) for answer in answers)
            known = await service._viewer_of(OTHER_UID)
            page = await asyncio.wait_for(service._metrics(make_mocked_request("GET", "/metrics")), timeout=SOON_S)
        finally:
            may_answer.set()
        assert known is not None
        return known.user, page.status

    assert asyncio.run(ask()) == (f"user{OTHER_UID}", 200)
