"""The HTTP front: OpenAI-compatible routes on a server whose drain is ours."""
