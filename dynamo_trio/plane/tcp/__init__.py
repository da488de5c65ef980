"""Dynamo's ``tcp`` request plane."""

from dynamo_trio.plane.net.tls import TlsSettings as TlsSettings
from dynamo_trio.plane.tcp.plane import TcpPlane as TcpPlane
from dynamo_trio.plane.tcp.plane import open_tcp_plane as open_tcp_plane
from dynamo_trio.plane.tcp.settings import TcpSettings as TcpSettings
