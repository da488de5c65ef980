"""The mux protocol between dynamo_trio peers, as bytes and values.

One connection carries every request between a client process and a worker.
``docs/reference/mux.md`` is its specification.
"""
