"""The SQL store: the only shared truth between explorer and trainer."""

from megarl.store.database import check_url
from megarl.store.store import Claim, Store

__all__ = ["Claim", "Store", "check_url"]
