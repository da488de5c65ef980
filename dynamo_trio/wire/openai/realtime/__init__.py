"""OpenAI's Realtime API (the events of its GA form), without I/O: text in and out."""
