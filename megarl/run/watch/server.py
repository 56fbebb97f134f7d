"""The server of `megarl watch`: pages of runs on loopback, behind a path that cannot be guessed."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from aiohttp import web
from markupsafe import Markup

from megarl.buffer.store import GroupPlace
from megarl.core.errors import MegarlError
from megarl.run.report.pieces import PIECES as FRAME
from megarl.run.watch import pages
from megarl.run.watch.watched import WatchedRun

T = TypeVar("T")
HOST = "127.0.0.1"


class WatchServer:
    """Serves pages of runs. They are made one at a time, in a thread of their own."""

    def __init__(self, runs: Mapping[str, WatchedRun], token: str = "") -> None:
        """Args:
        token: First part of every path, so that other users of the machine cannot read responses.
        """
        self._runs = runs
        self._thread = ThreadPoolExecutor(1)
        self.root = f"/{token or secrets.token_urlsafe(12)}/"

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[_safe])
        root = self.root
        app.add_routes(
            [
                web.get(root, self._index),
                web.get(f"{root}compare", self._compare),
                web.get(f"{root}{{run}}/", self._overview),
                web.get(f"{root}{{run}}/stamp", self._stamp),
                web.get(f"{root}{{run}}/groups", self._groups),
                web.get(f"{root}{{run}}/log", self._log),
                web.get(f"{root}{{run}}/{{curve:(reward|loss)_curve.png}}", self._curve),
            ]
        )
        return app

    async def _index(self, request: web.Request) -> web.Response:
        if len(self._runs) == 1:
            raise web.HTTPFound(f"{self.root}{quote(next(iter(self._runs)))}/")
        sections = await self._made(pages.runs, self.root, self._runs)
        return _page("runs", [pages.bar(self.root), *sections])

    async def _compare(self, request: web.Request) -> web.Response:
        named = [name for name in request.query.getall("run", []) if name in self._runs]
        found = {name: self._runs[name] for name in named or self._runs}
        sections = await self._made(pages.comparison, self.root, found, request.query.get("metric", ""))
        return _page("runs", [pages.bar(self.root), *sections])

    async def _overview(self, request: web.Request) -> web.Response:
        name, run = self._run(request)
        now = await self._made(run.now)
        sections = await self._made(pages.overview, now)
        return _page(name, [pages.bar(self.root, name, ""), *sections], poll="stamp", stamp=now.stamp)

    async def _stamp(self, request: web.Request) -> web.Response:
        _, run = self._run(request)
        return web.Response(text=(await self._made(run.now)).stamp)

    async def _groups(self, request: web.Request) -> web.Response:
        name, run = self._run(request)
        filters, words = request.query.get("filters", ""), request.query.get("words", "")
        before, after = (_place(request.query.get(name, "")) for name in ("before", "after"))

        def path_of(name: str, place: GroupPlace) -> str:
            return f"?{urlencode({'filters': filters, 'words': words, name: f'{place.rollout}.{place.position}'})}"

        newer = before is None and after is not None
        try:
            make = partial(pages.groups, newer=newer)
            sections, script = await self._made(make, run.folder, filters, words, before or after, path_of)
        except MegarlError as error:
            empty = pages.PIECES.search(filters, words, "", "", "", str(error))
            sections, script = [empty], ""
        return _page(name, [pages.bar(self.root, name, "groups"), *sections], more=script)

    async def _log(self, request: web.Request) -> web.Response:
        name, run = self._run(request)
        sections = await self._made(pages.log, run.folder, request.query.get("file", ""))
        return _page(name, [pages.bar(self.root, name, "log"), *sections])

    async def _curve(self, request: web.Request) -> web.FileResponse:
        _, run = self._run(request)
        path = run.folder / "report" / request.match_info["curve"]
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)

    async def _made(self, make: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, make, *arguments)

    def _run(self, request: web.Request) -> tuple[str, WatchedRun]:
        name = request.match_info["run"]
        if name not in self._runs:
            raise web.HTTPNotFound(text=f"no run {name!r} is watched")
        return name, self._runs[name]


def _place(text: str) -> GroupPlace | None:
    """Return the place that a query names; None if it names none."""
    found = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", text)
    return GroupPlace(int(found[1]), int(found[2])) if found else None


def _page(title: str, sections: list[Markup], *, poll: str = "", stamp: str = "", more: str = "") -> web.Response:
    nonce = secrets.token_urlsafe(12)
    text = pages.whole(f"{title}: megarl", sections, nonce=nonce, poll=poll, stamp=stamp, more=more)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; img-src 'self'; "
    policy += "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    return web.Response(text=text, content_type="text/html", headers=headers)


@web.middleware
async def _safe(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse other host names (DNS rebinding); show a damaged store as a page."""
    if request.url.host not in (HOST, "localhost"):
        raise web.HTTPForbidden(text="megarl watch answers requests to 127.0.0.1 and localhost only")
    try:
        return await handler(request)
    except (MegarlError, OSError) as error:
        return _page("megarl", [FRAME.section("This page cannot be made", str(error))])
