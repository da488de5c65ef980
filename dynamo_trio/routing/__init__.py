"""Which of the known workers gets a request: Dynamo's router modes as plain data structures.

Nothing here waits, opens a socket or reads a clock: workers, requests and KV events are told by
calls, and the time is an argument. Who calls is to come.
"""

from dynamo_trio.routing.abc import Ask as Ask
from dynamo_trio.routing.abc import Router as Router
from dynamo_trio.routing.abc import Target as Target
from dynamo_trio.routing.active import ActiveRequests as ActiveRequests
from dynamo_trio.routing.active import Load as Load
from dynamo_trio.routing.affinity import SessionAffinity as SessionAffinity
from dynamo_trio.routing.affinity import Sticky as Sticky
from dynamo_trio.routing.approximate import ApproximateIndex as ApproximateIndex
from dynamo_trio.routing.cost import CostSettings as CostSettings
from dynamo_trio.routing.kv import KvRouting as KvRouting
from dynamo_trio.routing.loaded import LeastLoaded as LeastLoaded
from dynamo_trio.routing.loaded import PowerOfTwo as PowerOfTwo
from dynamo_trio.routing.prefix_index import PrefixIndex as PrefixIndex
from dynamo_trio.routing.simple import Direct as Direct
from dynamo_trio.routing.simple import Random as Random
from dynamo_trio.routing.simple import RoundRobin as RoundRobin
