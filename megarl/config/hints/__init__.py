"""Names of settings in other libraries, for the error about an unknown setting."""

from __future__ import annotations

from megarl.config.hints.peers import PEERS
from megarl.config.hints.verl import VERL

__all__ = ["PEERS", "VERL", "in_our_words"]


def in_our_words(name: str) -> str | None:
    """Return a hint that names our setting for another library's ``name``; None if no table has ``name``.

    verl's settings are looked up by full name, others by the last word.
    """
    if (ours := VERL.get(name)) is not None:
        return f"{name} is verl's name; here it is {ours}"
    if (ours := PEERS.get(name.rpartition(".")[2])) is not None:
        return f"there is no setting {name!r}; what TRL, verl or OpenRLHF call so is here {ours}"
    return None
