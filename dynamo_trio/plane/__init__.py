"""How a request reaches an endpoint: the interface, and the planes behind it."""

from dynamo_trio.plane.abc import INITIAL_CREDIT as INITIAL_CREDIT
from dynamo_trio.plane.abc import AcceptedCall as AcceptedCall
from dynamo_trio.plane.abc import Acceptor as Acceptor
from dynamo_trio.plane.abc import Acknowledgements as Acknowledgements
from dynamo_trio.plane.abc import ClientStream as ClientStream
from dynamo_trio.plane.abc import Connections as Connections
from dynamo_trio.plane.abc import ItemSink as ItemSink
from dynamo_trio.plane.abc import Outbox as Outbox
from dynamo_trio.plane.abc import RequestHead as RequestHead
from dynamo_trio.plane.abc import RequestPlane as RequestPlane
from dynamo_trio.plane.abc import Rest as Rest
from dynamo_trio.plane.abc import Traffic as Traffic
from dynamo_trio.plane.choice import Planes as Planes
from dynamo_trio.plane.memory import MemoryPlane as MemoryPlane
