"""The SQL store: the only shared truth between explorer and trainer."""

from megarl.explore.store.claims import Claim, EndedGroup
from megarl.explore.store.database import OWN_SERVER, VARIABLE, check_url, sqlite_file
from megarl.explore.store.engines import EngineRoom
from megarl.explore.store.experts import ExpertExperience, ImportedSource
from megarl.explore.store.journal import NOTHING_USED, Used
from megarl.explore.store.late import AwaitingReward, GivenReward, Rewarded
from megarl.explore.store.pacing import UnusedGroup
from megarl.explore.store.replays import UsedGroup
from megarl.explore.store.selection import Glance, Selection, StoredGroup
from megarl.explore.store.store import Store

__all__ = [
    "AwaitingReward",
    "NOTHING_USED",
    "OWN_SERVER",
    "VARIABLE",
    "Claim",
    "EndedGroup",
    "EngineRoom",
    "ExpertExperience",
    "GivenReward",
    "Glance",
    "ImportedSource",
    "Rewarded",
    "Selection",
    "Store",
    "StoredGroup",
    "UnusedGroup",
    "Used",
    "UsedGroup",
    "check_url",
    "sqlite_file",
]
