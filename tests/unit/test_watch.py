"""``megarl watch``: pages of a run that trains, was killed, or is damaged; nothing unescaped, nothing written."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from megarl.buffer.store import Store
from megarl.cli import main
from megarl.core.errors import ConfigError
from megarl.core.jobs import STORE
from megarl.run.data.filters import selection_of
from megarl.run.data.open_run import StoredRun
from megarl.run.run_dir.owner import own_run_dir
from megarl.run.watch import pages as watch_pages
from megarl.run.watch.pages import GROUPS
from megarl.run.watch.server import WatchServer
from megarl.run.watch.watched import REST, WatchedRun, found_runs
from tests.unit.test_data_look import DATABASES, filled


@pytest.fixture(scope="module", params=DATABASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredRun]:
    with filled(request, tmp_path_factory.mktemp("run")) as run:
        write_log(run.run_dir)
        yield run


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredRun]:
    request.param = "sqlite"
    with filled(request, tmp_path) as run:
        yield run


def write_log(folder: Path) -> None:
    log = folder / "logs" / "attempt_1" / "trainer_0.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("step 1\nalarm entropy: step 2: <b>fell</b>\nalarm entropy: step 3: again <i>\n")


def pages(runs: dict[str, WatchedRun], *paths: str, host: str = "127.0.0.1") -> list[tuple[int, str]]:
    """Status and text of pages, in order."""

    async def main() -> list[tuple[int, str]]:
        server = WatchServer(runs, "token")
        async with TestClient(TestServer(server.app(), host="127.0.0.1")) as client:
            found = []
            for path in paths:
                response = await client.get(f"/token/{path}", headers={"Host": host})
                found.append((response.status, await response.text()))
            return found

    return asyncio.run(main())


def watched(run: StoredRun) -> dict[str, WatchedRun]:
    return {"looked": WatchedRun(run.run_dir)}


def test_the_newest_groups_are_those_of_the_filters(run: StoredRun) -> None:
    for words in ("", "kind=train", "kind=eval", "steps=2-3", "reward=1", "reward=..0 source=code", "reward=2.."):
        selection, _ = selection_of(words.split())
        wanted = [group for group, members in run.glances(selection) if any(map(selection.matches, members))][::-1]
        find = run.store.selection.newest
        found = find(selection, 100)
        assert (found.groups, found.at) == (wanted, None), words
        if len(wanted) < 4:
            continue
        first = find(selection, 1)
        second = find(selection, 2, start=first.at)
        assert first.groups + second.groups == wanted[:3] and second.at == second.places[-1]
        back = find(selection, 2, start=second.at, newer=True)
        assert back.groups == wanted[:2] and (back.at is None)
        assert find(selection, 1, start=second.at, newer=True).at == second.places[0]
        assert find(selection, len(wanted)).at is None
    everything, _ = selection_of([])
    by_id = run.store.selection.newest(everything, 100, "train-000002/").groups
    assert {group.group_id for group in by_id} == {"train-000002/0", "train-000002/1"}
    task = run.store.selection.tasks_named([by_id[0].task_id])[by_id[0].task_id]
    by_prompt = run.store.selection.newest(everything, 100, task.question).groups
    assert {group.task_id for group in by_prompt} == {task.task_id}
    assert run.store.selection.newest(everything, 100, "100%_").groups == []


def test_a_search_that_stops_early_goes_on(run: StoredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one group, one part a search: each group is found once, in both directions."""
    monkeypatch.setattr("megarl.buffer.store.selection.IDS", 1)
    selection, _ = selection_of(["reward=1"])
    find = partial(run.store.selection.newest, selection, 100)
    wanted = find(search_s=60).groups
    for newer in (False, True):
        at, searches = None, 0
        found: list[str] = []
        while at is not None or not searches:
            part = find(start=at, newer=newer, search_s=0)
            found += [group.group_id for group in (part.groups[::-1] if newer else part.groups)]
            at, searches = part.at, searches + 1
            assert searches < 100
        assert found[:: -1 if newer else 1] == [group.group_id for group in wanted] and searches > 2
    nothing, _ = watch_pages.groups(run.run_dir, "reward=9..", "", None, lambda name, place: f"#{name}", search_s=0)
    assert "older searches further." in str(nothing[0]) and "#before" in str(nothing[0])


def test_pages_lead_to_each_other(run: StoredRun) -> None:
    """Each group is on one page, in both directions."""
    everything, _ = selection_of([])
    wanted = run.store.selection.newest(everything, 100).groups

    def walked(link: str, path: str) -> tuple[list[str], str]:
        seen: list[str] = []
        while True:
            [(_, text)] = pages(watched(run), f"looked/groups{path}")
            on_page = [group.group_id for group in wanted if f"<h2>{group.group_id}</h2>" in text]
            seen = seen + on_page if link == "older" else on_page + seen
            found = re.search(rf'<a href="([^"]*)" data-key=".">?[^>]*>{link}</a>', text)
            if found is None:
                return seen, path
            path = found[1].replace("&amp;", "&")

    down, last = walked("older", "")
    assert down == [group.group_id for group in wanted] and len(down) > GROUPS
    assert walked("newer", last)[0] == down


def test_pages_of_a_run(run: StoredRun) -> None:
    older = "looked/groups?before=4.0"
    found = pages(watched(run), "", "looked/", "looked/groups", older, "looked/log", "compare", "looked/stamp")
    assert [status for status, _ in found] == [200] * 7
    _, overview, groups, older, log, compared, stamp = (text for _, text in found)
    assert "3 of" in overview and "entropy" in overview and "again &lt;i&gt;" in overview
    assert f'data-stamp="{stamp}"' in overview
    assert groups.count('<section class="group"') == 6 and older.count('<section class="group"') == 6
    assert ">&lt;</i>" in groups and "><</i>" not in groups
    assert "alarm entropy: step 2: &lt;b&gt;" in log and 'value="looked"' in compared
    scripts = [re.findall(r"<script([^>]*)>", text) for text in (overview, groups, older, log, compared)]
    assert all(len(each) == 1 and "nonce=" in each[0] for each in scripts)


def test_a_run_keeps_its_colour_where_another_has_no_curve(run: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text("{")
    run.store.journal.record_step(3, {"seen/metric": 1.0})
    [(_, text)] = pages({"broken": WatchedRun(tmp_path)} | watched(run), "compare?metric=seen%2Fmetric")
    assert 'class="run r1 dot"' in text and 'class="run r0 dot"' not in text


def test_filters_and_text_choose_groups(run: StoredRun) -> None:
    found = pages(
        watched(run),
        "looked/groups?filters=kind%3Deval",
        "looked/groups?words=train-000001%2F1",
        "looked/groups?filters=steps%3Dx",
        "looked/groups?words=nothing+has+this",
    )
    assert [status for status, _ in found] == [200] * 4
    evaluations, one, refused, none = (text for _, text in found)
    assert "eval-2/0" in evaluations and "train-0" not in evaluations
    assert one.count('<section class="group"') == 1
    assert "steps=x: write" in refused and "No group matches." in none


def test_who_may_ask(run: StoredRun) -> None:
    assert pages(watched(run), "looked/", host="evil.example")[0][0] == 403
    assert [status for status, _ in pages(watched(run), "other/", "looked/other", "../looked/")] == [404] * 3

    async def policy() -> str:
        async with TestClient(TestServer(WatchServer(watched(run), "token").app(), host="127.0.0.1")) as client:
            response = await client.get("/token/looked/groups")
            return response.headers["Content-Security-Policy"]

    said = asyncio.run(policy())
    assert "default-src 'none'" in said and "script-src 'nonce-" in said and "unsafe-eval" not in said


@pytest.mark.parametrize("kind", ["store", "metrics", "settings", "older"])
def test_what_cannot_be_read_is_said(own: StoredRun, kind: str) -> None:
    """Half-written files and stores of other versions give a page with the reason."""
    if kind == "store":
        own.store.close()
        (own.run_dir / "store.db").write_bytes(b"SQLite format 3\0" + b"\1" * 5000)
    elif kind == "metrics":
        (own.run_dir / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.0}\n{"step": 2, "sft/lo')
        (own.run_dir / "timeline").mkdir()
        (own.run_dir / "timeline" / "trainer_0.jsonl").write_text(
            '{"phase": "step", "start": 1.0, "seconds": 2.0}\n{"pha'
        )
    elif kind == "settings":
        settings = json.loads((own.run_dir / "resolved.json").read_text())
        (own.run_dir / "resolved.json").write_text(json.dumps(settings | {"unknown": {"a": 1}}))
    else:
        own.store.database.write(lambda c, again: c.exec_driver_sql("UPDATE job SET value='3' WHERE key='schema'"))
        own.store.close()
    found = pages(watched(own), "looked/", "looked/groups", "looked/log", "compare")
    assert [status for status, _ in found] == [200] * 4, [text[:300] for status, text in found if status != 200]
    assert all("Traceback" not in text for _, text in found)
    if kind != "metrics":
        assert "cannot be read" in found[0][1]


def test_a_run_is_read_again_when_it_changes_and_not_too_often(own: StoredRun) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # each reading takes a second
        return now[0]

    run = WatchedRun(own.run_dir, clock)
    first = run.now()
    (own.run_dir / "metrics.jsonl").write_text("{}\n")
    assert run.now() is first, "the reading is too young"
    now[0] += 2 * REST
    second = run.now()
    assert second.stamp != first.stamp
    now[0] += 4 * REST
    assert run.now() is second, "nothing has changed"


def test_nothing_is_written(own: StoredRun) -> None:
    own.store.close()
    before = {path: path.stat().st_mtime_ns for path in own.run_dir.rglob("*") if path.is_file()}
    pages(watched(own), "looked/", "looked/groups", "looked/log", "compare")
    after = {path: path.stat().st_mtime_ns for path in own.run_dir.rglob("*") if path.is_file()}
    assert {path: time for path, time in after.items() if path in before} == before
    assert all(path.name.startswith("store.db-") for path in after.keys() - before.keys())


def test_runs_are_found_in_folders(run: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(run.run_dir)
    assert list(found_runs([str(tmp_path)])) == [run.run_dir.name]
    assert list(found_runs([str(run.run_dir), str(tmp_path / "a")])) == [run.run_dir.name], "one run, named twice"
    with pytest.raises(ConfigError, match="is no run and has no runs"):
        found_runs([str(tmp_path / "a" / "logs")])


def test_the_terminal_shows_the_same(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run.run_dir), "--text", "--once"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not finished" in said and "alarm entropy, 2 times" in said


def test_the_command_serves(run: StoredRun, tmp_path: Path) -> None:
    """The printed address answers, and SIGTERM ends the server."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "megarl", "watch", str(run.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()

        async def ask() -> int:
            async with ClientSession() as session:
                for _ in range(100):
                    try:
                        async with session.get(url) as response:
                            return response.status
                    except OSError:
                        await asyncio.sleep(0.1)
            return 0

        status = asyncio.run(ask())
        server.terminate()
        assert server.wait(30) == 0 and status == 200


def test_a_store_is_opened_without_a_lock(own: StoredRun) -> None:
    """A job writes while pages are made."""
    run = watched(own)
    pages(run, "looked/", "looked/groups")
    writer = Store(f"sqlite:///{own.run_dir}/store.db")
    writer.journal.record_event("trainer", "seen", {})
    writer.close()


def test_a_job_that_runs_is_told_from_one_that_has_ended(own: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"looked": WatchedRun(own.run_dir, lambda: 0.0)}
    with own_run_dir(own.run_dir, STORE):
        [(_, overview)] = pages(runs, "looked/")
        assert "the same command resumes it" in overview, "the store's server runs no step"
    with own_run_dir(own.run_dir):
        [(_, overview)] = pages(runs, "looked/")
        assert "running: 3 of" in overview and "resumes it" not in overview
        assert main(["watch", str(own.run_dir), "--text", "--once"]) == 0
        assert "running" in capsys.readouterr().out
    [(_, overview)] = pages(runs, "looked/")
    assert "not finished: 3 of" in overview
