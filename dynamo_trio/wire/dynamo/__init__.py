"""Dynamo 1.5.1's own protocols as bytes and values: request plane, response stream, discovery.

Nothing speaks them yet: the request plane and the discovery backends that will stand on
them come next. They are checked against frames that were captured from the real thing.
"""
