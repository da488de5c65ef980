"""``/v1/realtime``: sessions over a WebSocket."""
