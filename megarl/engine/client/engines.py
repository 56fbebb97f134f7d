"""Engines that a client may ask, which come and go while it works."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megarl.core.schema import WeightsVersion

log = logging.getLogger(__name__)


class ClientEngines:
    """Engines that are there, and of these the open ones: they have the weights, as far as is known.

    One that refuses is closed only where the engines are ``followed``, which opens it again.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._open = set(urls)
        self._sampling: dict[str, bool] = {}
        """URL of an engine -> True if its last call gave a sample, False if it failed."""
        self.followed = False
        self.oldest = WeightsVersion(0, 0)
        """Newest of all oldest weights that samples were asked for with: a closed engine is opened once it has them."""

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the engines that are there."""
        return self._urls

    @property
    def closed(self) -> list[str]:
        """URLs of engines that are there and not open."""
        return [url for url in self._urls if url not in self._open]

    def to_ask(self) -> list[str]:
        """URLs of open engines; of all where none is open."""
        return [url for url in self._urls if url in self._open] or self._urls

    def replace(self, urls: Sequence[str]) -> None:
        """Have other engines; new ones are closed. Of none nothing changes: they are between two attempts."""
        if urls:
            self._urls = list(urls)
            self._open &= set(urls)
            self._sampling = {url: samples for url, samples in self._sampling.items() if url in urls}

    def expect(self, oldest: WeightsVersion | None) -> None:
        """Record the oldest weights version that may sample the requests."""
        self.oldest = max(self.oldest, oldest or self.oldest)

    def gave(self, url: str) -> None:
        """Take note of a sample; the first one of an engine that came, or had failed, is logged."""
        if not self._sampling.get(url, False):
            self._sampling[url] = True
            log.info("the engine at %s samples", url)

    def failed(self, url: str, why: object) -> None:
        """Take note of a failed call; the first one since the engine gave a sample is logged."""
        if self._sampling.get(url, True):
            self._sampling[url] = False
            log.warning("%s; asking again for the samples of its failed calls", why)

    def open(self, url: str) -> None:
        """Take note that an engine has the weights."""
        self._open.add(url)

    def close(self, url: str) -> bool:
        """Take note that an engine refuses; return True if others are to be asked instead."""
        if not self.followed:
            return False
        self._open.discard(url)
        return bool(self._open)
