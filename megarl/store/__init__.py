"""The SQL store: the only shared truth between explorer and trainer."""

from megarl.store.store import Claim, Store

__all__ = ["Claim", "Store"]
