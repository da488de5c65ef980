"""Bytes and values of every protocol: no I/O, no clock, no Trio."""
