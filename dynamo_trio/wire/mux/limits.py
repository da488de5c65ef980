"""What a mux connection carries at most. Sizes are in bytes."""

from __future__ import annotations

from attrs import frozen

from dynamo_trio.wire.dynamo.two_part import MAX_MESSAGE

#: What both ends say before anything else.
MAGIC = b"dynmux\r\n"
#: The versions of the protocol that this code speaks.
VERSIONS = (1,)

#: The largest frame: its type and body. The four bytes of its length are not counted.
MAX_FRAME = 64 * 2**10
#: A payload above this goes ahead in PART frames of at most this size.
MAX_PIECE = 32 * 2**10

MAX_PATH = 1024
MAX_REQUEST_ID = 1024
#: Keys and values of the metadata of one request together, and how many.
MAX_METADATA = 16 * 2**10
MAX_METADATA_ITEMS = 256
#: Paths that one DRAINING or SERVING frame names. Together with their length they fit a frame.
MAX_PATHS = 32
#: Characters of the text of a GOAWAY, of a name of software, of what tells processes apart.
MAX_TEXT = 1000
MAX_SOFTWARE = 100
MAX_PROCESS = 64

#: A PART below this is a trifle, unless the message is over with it.
SMALL_PIECE = 1024

#: One item costs one credit, and one more for every so many bytes of it.
BYTES_PER_CREDIT = 64 * 2**10
#: A stream has never more credit than this.
MAX_CREDIT = 2**31 - 1
MAX_SID = 2**31 - 1
MAX_TOKEN = 2**32 - 1
#: Of numbers that only one end gives meaning to: pings, notices, places, nanoseconds.
MAX_NUMBER = 2**63 - 1


@frozen
class MuxLimits:
    """What one end takes from the other; the peer is told the first two.

    ``max_streams``: requests at once over this connection; a cancelled one counts until its call
    has ended. Only a worker's counts. ``max_message``: bytes of the largest payload.
    ``max_control``: bytes of frames that wait to answer what the peer sent; above it the
    connection is congested and should not be read.
    """

    max_streams: int = 4096
    max_message: int = MAX_MESSAGE
    max_control: int = 256 * 2**10
