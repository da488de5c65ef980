"""The ``mux`` request plane: one connection between two processes carries every request."""

from dynamo_trio.plane.mux.plane import MuxPlane as MuxPlane
from dynamo_trio.plane.mux.plane import open_mux_plane as open_mux_plane
from dynamo_trio.plane.mux.settings import MuxSettings as MuxSettings
