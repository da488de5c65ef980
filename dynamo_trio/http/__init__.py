"""The HTTP server under frontend and status port: accept loop, containment, deadlines, bodies."""
