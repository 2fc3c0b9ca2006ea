"""The board page in a real browser, with a real Prometheus that serves it and a real job."""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grafana.build import __main__ as build
from grafana.build import queries
from launcher.boards.assets import boards_script, write_assets
from tests.grafana.browser import Page, browser_unavailable, open_browser
from tests.grafana.substitute import MAY_BE_EMPTY, panels_of
from tests.grafana.watched_job import HOSTILE, WORKERS, hostile_target, watched_job
from tests.realstack.stack import Stack, prometheus_unavailable

pytestmark = [pytest.mark.prometheus, pytest.mark.browser]

JOB = json.loads((build.DASHBOARDS / "gpujob-job.json").read_text("utf-8"))
PANELS = {panel["title"]: panel for panel in panels_of(JOB) if panel["type"] != "row"}
STEP_S = 15  # between the points of a panel, at most
MOST_WORK = 4.0  # of the page's own thread until all panels are there, as a multiple of PLAIN_WORK
PLAIN_WORK = """(() => {  // 40,000 elements are made and laid out, which is 0.2 s on a usual machine
  const box = document.body.appendChild(document.createElement('div'));
  for (let round = 0; round < 20; round++) {
    box.replaceChildren(...Array.from({length: 2000}, (_, i) => {
      const one = document.createElement('span');
      one.textContent = i * round;
      return one;
    }));
    box.offsetHeight;
  }
  box.remove();
})()"""
UNNAMED = (
    "[...document.querySelectorAll('.panel, .box, svg[role=img]')]"
    ".filter(n => !n.getAttribute('aria-label') && !n.getAttribute('aria-labelledby')).length"
)
CHOOSE_EVIL = (
    "(s => { s.value = 'evil'; s.dispatchEvent(new Event('change')); })(document.querySelector('.choices select'))"
)
OPEN_ROWS = "document.querySelectorAll('h2 button[aria-expanded=false]').forEach(button => button.click())"
ALL_DRAWN = "[...document.querySelectorAll('.box')].every(box => box.childNodes.length)"
MARKED = (
    "Object.fromEntries([...document.querySelectorAll('label:has(> input + i)')]"
    ".map(label => [label.textContent, label.firstChild.checked]))"
)
SLOW_ANSWERS = (
    "(fetch => { window.fetch = async (...all) => "
    "{ await new Promise(go => setTimeout(go, 500)); return fetch(...all); } })(window.fetch)"
)
KEEP_WAIT = (  # between the last answer and the next question
    "(old => { render = () => { window.waited_s ??= (Date.now() - heard) / 1000; return old(); }; })(render)"
)
ERRORS = "[...document.querySelectorAll('.error')].map(e => e.textContent)"
WATCH_SAID = """window.said = [];  // every change of what a screen reader reads aloud
  const watch = new MutationObserver(all => said.push(...all.map(one => one.target.id)));
  for (const node of document.querySelectorAll('[role=status], [aria-live=polite]')) {
    watch.observe(node, {childList: true, subtree: true});
  }
"""
RANGE_MS = "(q => q.get('to') - q.get('from'))(new URLSearchParams(location.search))"
FIRST_PLOT = "document.querySelector('.timeseries .area')"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prometheus with a running job, one of whose workers has failed."""
    if reason := prometheus_unavailable() or browser_unavailable():
        pytest.skip(reason)
    with watched_job(tmp_path_factory.mktemp("watched")) as (stack, job), hostile_target(stack):
        stack.wait_for(lambda: stack.query("sum(gpujob_worker_items) > 0"), 60, "progress")
        os.kill(job.worker(2)["pid"], signal.SIGSEGV)
        stack.wait_for(lambda: stack.query('gpujob_worker_exits_total{cluster="here"} > 0'), 60, "the failed worker")
        stack.wait_for(lambda: stack.query(f'count(gpujob_worker_up{{cluster="here"}}) == {WORKERS}'), 60, "workers")
        seen = f"gpujob_output_files_invalid offset {STEP_S}s"  # a panel shows no series that began since its last step
        stack.wait_for(lambda: stack.query(seen), 60, "the first look at the files")
        yield stack


def address(stack: Stack, variables: str = "var-cluster=here", since: str = "now-1m") -> str:
    return f"{stack.url()}/user/index.html?board=gpujob-job&{variables}&from={since}&to=now"


async def open_all(page: Page, url: str) -> None:
    """Show a board with all its rows."""
    await page.open(url)
    await page.run(OPEN_ROWS)
    await page.wait(ALL_DRAWN)


def browse(work: Callable[[Page], Awaitable[None]], width: int = 1400) -> None:
    async def main() -> None:
        async with open_browser(width) as page:
            await work(page)
            assert page.log == []

    asyncio.run(main())


def test_every_panel_is_drawn_and_no_other_server_is_asked(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack) + "&prometheus=http://127.0.0.1:9")
        first = await page.run("[...document.querySelectorAll('.panel h3')].map(h => h.textContent)")
        assert first == [panel["title"] for panel in JOB["panels"] if panel["type"] != "row"]
        await page.run(OPEN_ROWS)
        await page.wait(ALL_DRAWN)
        titles = await page.run("[...document.querySelectorAll('.panel h3')].map(h => h.textContent)")
        assert titles == list(PANELS)
        assert await page.run("[...document.querySelectorAll('.error')].map(e => e.textContent)") == []
        names = {query.expr: query.name for query in queries.all_queries()}
        may_be_empty = [
            title
            for title, panel in PANELS.items()
            if {names[target["expr"]] for target in panel.get("targets") or []} <= MAY_BE_EMPTY.keys()
        ]
        empty = "[...document.querySelectorAll('.panel:has(.none) h3')].map(h => h.textContent)"
        await page.run("S.every = 1")  # one scrape that is too late makes panels of this moment empty
        await page.wait(f"{ALL_DRAWN} && {empty}.every(title => {json.dumps(may_be_empty)}.includes(title))")
        await page.run("S.every = 0")
        assert {url for url in page.requests if not url.startswith((stack.url(), "data:"))} == set()
        assert page.most_queries <= 6
        assert await page.run(UNNAMED) == 0
        assert await page.run("document.querySelectorAll('.mark line').length") > 0
        assert await page.run(MARKED) == {mark["name"]: mark["enable"] for mark in JOB["annotations"]["list"]}

    browse(work)


async def work_s(page: Page) -> float:
    """CPU seconds of the page's own thread so far."""
    metrics = (await page.call("Performance.getMetrics"))["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


def test_a_board_with_all_its_rows_costs_little_time(stack: Stack) -> None:
    """Beside the same browser's plain work, since machines differ. The least of three: a busy one disturbs both."""
    found: list[float] = []

    async def work(page: Page) -> None:
        await open_all(page, address(stack))
        board_s = await work_s(page)
        await page.run(PLAIN_WORK)
        found.append(board_s / (await work_s(page) - board_s))

    while len(found) < 3 and min(found, default=MOST_WORK + 1) > MOST_WORK:
        browse(work)
    assert min(found) <= MOST_WORK, found


def test_all_panels_are_drawn_when_a_round_takes_longer_than_the_refresh(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack))
        await page.run(SLOW_ANSWERS)
        await page.run("S.every = 1")
        for _ in range(2):
            rounds = int(await page.run("document.body.dataset.drawn"))
            await page.wait(f"document.body.dataset.drawn > {rounds}")

    browse(work)


@pytest.mark.parametrize("held", ["*/api/v1/*", "*/api/v1/query*"], ids=["all", "those after the variables"])
def test_queries_without_an_answer_become_errors_and_are_asked_again(stack: Stack, held: str) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack))
        await page.run("S.every = S.patience = 1")
        await page.call("Fetch.enable", patterns=[{"urlPattern": held}])  # a half-open connection gives none either
        await page.wait("document.querySelectorAll('.error').length")
        assert set(await page.run(ERRORS)) == {f"Prometheus does not answer at {stack.url()}"}
        await page.call("Fetch.disable")
        await page.run("S.patience = 60")  # for answers of a busy machine
        await page.wait("document.querySelectorAll('.line').length && !document.querySelector('.error')")

    browse(work)


def test_marks_that_are_not_known_are_not_drawn(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack))
        await page.wait("document.querySelectorAll('.mark line').length")
        await page.run("board().annotations.list.forEach(mark => { if (mark.expr) mark.expr = 'sum('; })")
        await page.run("render()")
        await page.wait("document.getElementById('status').textContent.includes('marks failed')")
        assert await page.run("document.querySelectorAll('.mark').length") == 0
        assert await page.run(ERRORS) == []
        page.log.clear()  # the browser itself logs the status 400

    browse(work)


def test_hostile_names_are_text_and_no_foreign_script_runs(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await open_all(page, address(stack, "var-cluster=evil"))
        assert await page.run("document.querySelector('.table td').textContent") == HOSTILE
        assert HOSTILE in await page.run("document.querySelector('.state-timeline svg').textContent")
        assert await page.run("document.querySelectorAll('main img, main script').length") == 0
        assert page.log == []
        await page.run(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
        )
        assert await page.run("window.ran === undefined")
        assert await page.run("fetch('http://127.0.0.1:9/').catch(e => 'refused')") == "refused"
        assert len(page.log) >= 2
        assert all("Content Security Policy" in line for line in page.log if "ERR_" not in line)
        page.log.clear()

    browse(work)


def test_small_values_keep_their_digits(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack))
        values = "[3e-5, -1e-5, 9.4e-4, 0.001, 0.03, 0].map(v => format(v))"
        assert await page.run(values) == ["3.0e-5", "-1.0e-5", "9.4e-4", "0.0010", "0.03", "0"]
        axis = await page.run("steps_between(0, 3e-5, 3, 'short').map(v => format(v))")
        assert axis == ["0", "1.0e-5", "2.0e-5", "3.0e-5"]
        assert await page.run("format(3e-5, 'short', 2)") == "0.00"  # a panel that asks for two decimals

    browse(work)


def test_a_drag_zooms_and_the_variables_and_the_history_work(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await open_all(page, address(stack))
        first = await page.run("location.search")
        place = await page.run(f"(r => [r.x, r.y, r.width, r.height])({FIRST_PLOT}.getBoundingClientRect())")
        y = place[1] + place[3] / 2
        await page.mouse("mouseMoved", place[0] + place[2] * 0.9, y)
        assert await page.run(
            "!document.getElementById('tip').hidden && document.querySelectorAll('#tip tr').length > 0"
        )
        assert await page.run("document.querySelectorAll('.hair[visibility=visible]').length") > 20
        await page.mouse("mousePressed", place[0] + place[2] * 0.6, y)
        await page.mouse("mouseMoved", place[0] + place[2] * 0.9, y)
        await page.mouse("mouseReleased", place[0] + place[2] * 0.9, y)
        await page.wait("/from=\\d{13}&to=\\d{13}/.test(location.search)")
        await page.run("history.back()")
        await page.wait("location.search.includes('now-1m')")
        assert first.split("&")[0] in await page.run("location.search")
        await page.run("[...document.querySelectorAll('.choice label')].find(l => l.textContent !== 'All').click()")
        await page.wait("location.search.includes('var-node=')")
        assert "var-node=%24__all" not in await page.run("location.search")
        await page.run(CHOOSE_EVIL)
        await page.wait("document.querySelector('.table td')?.textContent.includes('<img')")
        assert "var-cluster=evil" in await page.run("location.search")

    browse(work)


def test_rows_close_and_the_cross_hair_follows_the_keys(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await open_all(page, address(stack))
        asked = len(page.requests)
        await page.run("document.querySelector('h2 button').click()")
        closed = await page.run("document.querySelectorAll('.panel').length")
        assert closed < len(PANELS)
        assert len(page.requests) == asked
        await page.run("document.querySelector('h2 button').click()")
        await page.wait(ALL_DRAWN)
        assert await page.run("document.querySelectorAll('.panel').length") == len(PANELS)
        await page.run("document.querySelector('.timeseries .box').focus()")
        await page.key("ArrowLeft")
        shown = await page.run("document.querySelector('#tip time').textContent")
        await page.key("ArrowLeft")
        assert await page.run("document.querySelector('#tip time').textContent") < shown
        assert await page.run("document.getElementById('tip').ariaLive") == "polite"
        await page.key("Escape")
        assert await page.run("document.getElementById('tip').hidden")

    browse(work)


def test_keys_go_to_the_ends_and_zoom(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack, since="now-5m"))
        await page.run("S.every = 0")
        await page.run(f"{FIRST_PLOT}.parentNode.focus()")
        for key, end in (("Home", "from"), ("End", "to")):
            await page.key(key)
            assert await page.run("hair.t === S.time." + end)
            assert await page.run("document.querySelector('#tip time').textContent === date(hair.t)")
        await page.key("+")  # half of the range, around the cross-hair
        await page.wait("/from=\\d{13}&to=\\d{13}/.test(location.search)")
        near = await page.run(RANGE_MS)
        assert near == pytest.approx(150_000, abs=30_000)  # ends of a range are multiples of its step
        await page.wait("PLOTS.get(document.activeElement)?.time === S.time")  # the plot has the new range
        await page.key("-")
        await page.wait(f"({RANGE_MS}) > {near}")
        assert await page.run(RANGE_MS) == pytest.approx(2 * near, abs=30_000)

    browse(work)


def test_escape_closes_a_menu_and_goes_back_to_its_button(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack))
        await page.run("document.querySelector('summary[aria-label=\"Absolute time range\"]').click()")
        await page.run("document.querySelector('details[open] input').focus()")
        await page.key("Escape")
        assert await page.run("document.querySelectorAll('details[open]').length") == 0
        assert await page.run("document.activeElement.ariaLabel") == "Absolute time range"

    browse(work)


def test_a_range_that_ends_now_is_refreshed_every_15_seconds_except_in_a_hidden_tab(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack))
        await page.run(KEEP_WAIT)
        await page.wait("document.body.dataset.drawn > 1")
        assert 15 <= await page.run("waited_s") < 45  # after the last answer, on a busy machine, too
        await page.run("S.every = 1")
        await page.run("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        await page.wait("!running")
        asked = len(page.requests)
        await asyncio.sleep(3)
        assert await page.run("document.hidden")
        assert len(page.requests) == asked
        await page.run("delete document.hidden")
        rounds = int(await page.run("document.body.dataset.drawn"))
        await page.wait(f"document.body.dataset.drawn > {rounds}")
        await page.run("change({from: String(Date.now() - 60000), to: String(Date.now())})")  # ends at a moment
        asked = len(page.requests)
        await asyncio.sleep(3)
        assert len(page.requests) == asked

    browse(work)


def test_a_panel_with_the_focus_is_painted_again(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack))
        for part in ("th:nth-child(2) button", ".legend button:last-child"):
            await page.run(f"(window.old = document.querySelector('{part}')).focus()")
            await page.run("render()")
            await page.wait("!document.contains(old)")
            assert await page.run(f"document.activeElement === document.querySelector('{part}')")
            assert await page.run("document.activeElement.textContent === old.textContent")
        await page.run("document.querySelector('th:not([aria-sort]) button').focus()")
        await page.run("document.activeElement.click()")
        assert await page.run("document.activeElement.parentNode.ariaSort") == "descending"

    browse(work)


def test_a_refresh_is_not_read_aloud_and_leaves_an_open_list(stack: Stack) -> None:
    async def work(page: Page) -> None:
        await page.open(address(stack))
        await page.run(WATCH_SAID)
        await page.run("(window.list = document.querySelectorAll('.choices select')[1]).focus()")
        await page.run("render()")
        assert await page.run("document.contains(list) && document.activeElement === list")
        x, y = await page.run(f"(r => [r.x + r.width * 0.9, r.y + 20])({FIRST_PLOT}.getBoundingClientRect())")
        await page.mouse("mouseMoved", x, y)
        assert await page.run("!document.getElementById('tip').hidden")
        assert await page.run("said") == []
        await page.run("(old => { values_of = async v => [...await old(v), 'new'] })(values_of)")
        await page.run("render()")
        assert await page.run("document.activeElement !== list && document.activeElement.innerText.includes('new')")

    browse(work)


@pytest.mark.parametrize("width", [390, 2560])
def test_no_width_scrolls_sideways(stack: Stack, width: int) -> None:
    async def work(page: Page) -> None:
        await open_all(page, address(stack))
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        places: list[Any] = await page.run(
            "[...document.querySelectorAll('.panel')].map(p => Math.round(p.getBoundingClientRect().x))"
        )
        columns = len(set(places))
        assert columns == 2 if width < 760 else columns > 2

    browse(work, width)


def test_the_page_opens_from_disk(stack: Stack, tmp_path: Path) -> None:
    write_assets(tmp_path, stack.url())

    async def work(page: Page) -> None:
        await open_all(
            page, (tmp_path / "index.html").as_uri() + "?board=gpujob-job&var-cluster=here&from=now-1m&to=now"
        )
        assert await page.run("document.querySelectorAll('.error').length") == 0
        assert await page.run("document.querySelectorAll('.line').length") > 20

    browse(work)


def test_a_page_whose_prometheus_is_not_there_says_so(stack: Stack, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    write_assets(tmp_path, url)

    async def work(page: Page) -> None:
        await page.open((tmp_path / "index.html").as_uri() + "?board=gpujob-job")
        assert await page.run(ERRORS) == [f"Prometheus does not answer at {url}"]
        assert await page.run("document.querySelector('[role=status]').textContent") == (
            f"Prometheus does not answer at {url}"
        )
        assert all("ERR_CONNECTION_REFUSED" in line for line in page.log)
        page.log.clear()

    browse(work)


def test_a_failed_query_shows_in_its_panel_alone(stack: Stack, tmp_path: Path) -> None:
    write_assets(tmp_path, stack.url())
    script = (tmp_path / "dashboards.js").read_text("utf-8")
    broken = script.replace(json.dumps(PANELS["Rate"]["targets"][0]["expr"])[1:-1], "sum(", 1)
    assert broken != script
    (tmp_path / "dashboards.js").write_text(broken, "utf-8")

    async def work(page: Page) -> None:
        await open_all(page, (tmp_path / "index.html").as_uri() + "?board=gpujob-job&var-cluster=here&from=now-1m")
        (error,) = await page.run("[...document.querySelectorAll('.panel:has(.error)')].map(p => p.innerText)")
        assert await page.run("document.querySelector('[role=status]').textContent") == "Failed panels: 1"
        assert error.startswith("Rate")
        assert "parse error" in error
        page.log.clear()  # the browser itself logs the status 400

    browse(work)


def sink() -> dict[str, Any]:
    """A board with the types and options that the job board has not."""
    worker = {"expr": 'gpujob_worker_throughput_items_per_second{cluster="$cluster"}', "legendFormat": "{{worker}}"}
    instant = {**worker, "instant": True, "format": "table"}
    links = [{"title": "More", "url": "/d/gpujob-job?var-x=${__data.fields.worker}&from=${__data.fields.rate.numeric}"}]
    bad = [{"title": "bad", "url": "${__data.fields.job}"}]
    order = {"excludeByName": {"Time": True}, "indexByName": {"worker": 0}, "renameByName": {"Value #A": "rate"}}
    kinds: list[dict[str, Any]] = [
        {"type": "heatmap", "options": {"color": {"scheme": "Turbo"}}},
        {"type": "state-timeline", "options": {"rowHeight": 0.9}},
        {"type": "stat", "options": {"textMode": "value_and_name"}},
        {"type": "bargauge", "options": {}},
        {"type": "gauge", "options": {}},
        {
            "type": "table",
            "options": {},
            "transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": order}],
            "targets": [{**instant, "refId": "A"}, {**instant, "refId": "B", "expr": "gpujob_worker_up"}],
            "fieldConfig": {
                "defaults": {},
                "overrides": [
                    {"matcher": {"options": "worker"}, "properties": [{"id": "links", "value": links}]},
                    {"matcher": {"options": "job"}, "properties": [{"id": "links", "value": bad}]},
                ],
            },
        },
        {
            "type": "timeseries",
            "options": {},
            "fieldConfig": {"defaults": {"custom": {"fillOpacity": 60, "stacking": {"mode": "normal"}}}},
        },
    ]
    field = {
        "defaults": {"unit": "short", "min": 0, "max": 1, "color": {"mode": "thresholds"}, "thresholds": {"steps": []}}
    }
    panels = [
        {
            "id": i,
            "title": f"P{i}",
            "gridPos": {"x": i % 2 * 12, "y": i // 2 * 8, "w": 12, "h": 8},
            "fieldConfig": field,
        }
        | {"targets": [{**worker, "refId": "A"}], **kind}
        for i, kind in enumerate(kinds)
    ]
    closed = {"type": "row", "title": "Closed", "collapsed": True, "gridPos": {"x": 0, "y": 90, "w": 24, "h": 1}}
    more = {**panels[2], "id": 99, "title": "Inside", "gridPos": {"x": 0, "y": 91, "w": 6, "h": 4}}
    return {
        **JOB,
        "uid": "sink",
        "title": "Sink",
        "panels": [*panels, {**closed, "panels": [more]}],
        "templating": {"list": JOB["templating"]["list"][:2]},
    }


def test_types_that_the_job_board_has_not_are_drawn_and_links_lead_to_boards(stack: Stack, tmp_path: Path) -> None:
    write_assets(tmp_path, stack.url())
    (tmp_path / "dashboards.js").write_text(boards_script({"sink": sink(), "gpujob-job": JOB}), "utf-8")

    async def work(page: Page) -> None:
        await page.open((tmp_path / "index.html").as_uri() + "?board=sink&var-cluster=here&from=now-1m&to=now")
        assert await page.run("[...document.querySelectorAll('.error, .none')].map(e => e.textContent)") == []
        for part in ("canvas.cells", ".state", ".bar b", ".dial", ".fill", ".line", ".legend button"):
            assert await page.run(f"document.querySelectorAll('{part}').length"), part
        href = await page.run("document.querySelector('td a').getAttribute('href')")
        assert re.fullmatch(r"\?board=gpujob-job&var-x=worker_w\d&from=\d+(\.\d+)?", href)
        assert await page.run("[...document.querySelectorAll('td a')].every(a => a.search.startsWith('?board='))")
        link = await page.run("document.querySelector('.choices > a').search")
        assert link == "?board=gpujob-fleet&var-cluster=here&from=now-1m&to=now"
        assert await page.run("document.querySelectorAll('.panel').length") == 7
        asked = len(page.requests)
        await page.run("[...document.querySelectorAll('h2 button')].at(-1).click()")
        await page.wait("document.querySelectorAll('.tile').length > 8")
        assert len(page.requests) > asked

    browse(work)
