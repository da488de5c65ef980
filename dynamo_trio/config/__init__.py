"""Configuration: :class:`Config`, made once from flags and environment."""

from dynamo_trio.config.config import Config as Config
from dynamo_trio.config.names import LogFilter as LogFilter
from dynamo_trio.config.option import Group as Group
from dynamo_trio.config.programs import ProgramSpec as ProgramSpec
from dynamo_trio.config.show import effective as effective
from dynamo_trio.config.tables.discovery import DiscoveryBackend as DiscoveryBackend
from dynamo_trio.config.tables.front import RouterMode as RouterMode
from dynamo_trio.config.tables.model import EngineKind as EngineKind
from dynamo_trio.config.tables.model import SimFault as SimFault
from dynamo_trio.config.tables.request_plane import CodecName as CodecName
from dynamo_trio.config.tables.stop import DrainPolicy as DrainPolicy
from dynamo_trio.config.tables.stop import GraceMode as GraceMode

__all__ = [
    "CodecName",
    "Config",
    "DiscoveryBackend",
    "DrainPolicy",
    "EngineKind",
    "GraceMode",
    "Group",
    "LogFilter",
    "ProgramSpec",
    "RouterMode",
    "SimFault",
    "effective",
]
