"""Connections, listened for or dialled, plain or with TLS: what the planes share."""
