"""Engines: a core that generates tokens, the loop that drives it, and where it runs."""

from dynamo_trio.engines.engine import Engine as Engine
from dynamo_trio.engines.engine import open_engine as open_engine
from dynamo_trio.engines.hosts import Host as Host
from dynamo_trio.engines.hosts import InlineHost as InlineHost
from dynamo_trio.engines.hosts import ThreadHost as ThreadHost
from dynamo_trio.engines.protocol import CachingCore as CachingCore
from dynamo_trio.engines.protocol import CheckedCore as CheckedCore
from dynamo_trio.engines.protocol import CoreInfo as CoreInfo
from dynamo_trio.engines.protocol import Delta as Delta
from dynamo_trio.engines.protocol import FinishReason as FinishReason
from dynamo_trio.engines.protocol import KvEvent as KvEvent
from dynamo_trio.engines.protocol import Request as Request
from dynamo_trio.engines.protocol import Stats as Stats
from dynamo_trio.engines.protocol import StepCore as StepCore
from dynamo_trio.engines.registry import KINDS as KINDS
from dynamo_trio.engines.registry import CoreSpec as CoreSpec
from dynamo_trio.engines.registry import make_core as make_core
from dynamo_trio.engines.states import Limits as Limits
from dynamo_trio.engines.states import State as State
from dynamo_trio.engines.stream import DeltaStream as DeltaStream
