"""Distribute files over threads, with a progress bar. Reading, casting, digests and writing all release the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")
Count = Callable[[int], None]
"""Adds finished bytes to the progress; raises if another worker has failed."""


def each(
    what: str, items: Sequence[T], act: Callable[[T, Count], None], *, total: int, workers: int, progress: bool = True
) -> None:
    """Run ``act`` for every item; the first error stops all. ``total``: bytes that all items count together."""
    lock, stop = threading.Lock(), threading.Event()
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None if progress else True)

    def count(size: int) -> None:
        if stop.is_set():
            raise _Stopped
        with lock:
            bar.update(size)

    # One torch thread per worker: the workers are the parallelism.
    pool = ThreadPoolExecutor(max(workers, 1), initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in as_completed([pool.submit(act, item, count) for item in items]):
            future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        bar.close()


class _Stopped(Exception):
    """Another worker failed; never visible outside, because that worker's error is raised first."""
