"""Configuration: :class:`Config`, made once from flags and environment."""

from dynamo_trio.config.config import Config as Config
from dynamo_trio.config.config import DrainPolicy as DrainPolicy
from dynamo_trio.config.config import EngineKind as EngineKind
from dynamo_trio.config.config import GraceMode as GraceMode
from dynamo_trio.config.config import SimFault as SimFault
from dynamo_trio.config.names import LogFilter as LogFilter
from dynamo_trio.config.option import Group as Group
from dynamo_trio.config.show import effective as effective

__all__ = [
    "Config",
    "DrainPolicy",
    "EngineKind",
    "GraceMode",
    "Group",
    "LogFilter",
    "SimFault",
    "effective",
]
