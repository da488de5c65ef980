"""OpenAI's HTTP API as bytes and values: requests, answers, events, templates, stop strings."""
