"""The client side of the ``tcp`` plane: requests out, answers in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import trio

    from dynamo_trio.plane.abc import ClientStream, ItemSink, RequestHead
    from dynamo_trio.plane.tcp.settings import TcpSettings


@attrs.define(eq=False)
class TcpClientSide:
    """Its tasks live in ``nursery``, and end when that is cancelled."""

    settings: TcpSettings
    nursery: trio.Nursery

    def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.open_stream`."""
        raise NotImplementedError

    def instance_gone(self, address: str) -> None:
        """As :meth:`~dynamo_trio.plane.abc.RequestPlane.instance_gone`."""
