"""OpenAI's SDK as it is, in a process of its own (half of it runs on asyncio).

Usage: ``python realtime_clients.py sync|async|drain URL``. Prints one line of JSON.
"""

import asyncio  # noqa: TID251 - a program of its own, as a user writes it
import json
import sys
from collections.abc import Callable
from typing import Any

import openai
import websockets

DRAINING = "dynamo_trio.session.draining"


def item(text: str) -> Any:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": "user", "content": content}


def done(event: Any, seen: list[list[str]]) -> bool:
    """Note an event; is it the last of a response?"""
    seen.append([type(event).__name__, event.type])
    return bool(event.type == "response.done")


def sync(url: str) -> Any:
    seen: list[list[str]] = []
    deltas: list[str] = []
    client = openai.OpenAI(api_key="any", base_url=f"{url}/v1")
    event: Any = None
    with client.realtime.connect(model="sim") as connection:
        connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        connection.conversation.item.create(item=item("hello"))
        connection.response.create(response={"max_output_tokens": 8})
        for event in connection:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if done(event, seen):
                break
    said = event.response.output[0].content[0].text
    usage = event.response.usage.output_tokens
    return {"seen": seen, "deltas": "".join(deltas), "text": said, "tokens": usage}


async def in_asyncio(url: str) -> Any:
    seen: list[list[str]] = []
    deltas: list[str] = []
    errors: list[str | None] = []
    client = openai.AsyncOpenAI(api_key="any", base_url=f"{url}/v1")
    event: Any = None
    async with client.realtime.connect(model="sim") as connection:
        bogus: Any = {"type": "bogus.event", "event_id": "mine"}
        await connection.send(bogus)
        await connection.conversation.item.create(item=item("hello"))
        await connection.response.create(response={"max_output_tokens": 8})
        async for event in connection:
            if event.type == "error":
                errors.append(event.error.event_id)
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if done(event, seen):
                break
        await connection.response.create()
        await connection.response.cancel()
        async for event in connection:
            if done(event, seen):
                break
    status = event.response.status
    return {"seen": seen, "deltas": "".join(deltas), "errors": errors, "status": status}


def drain(url: str) -> Any:
    """Talk until the server stops; say so when the first answer is there."""
    seen: list[list[str]] = []
    notice: Any = None
    code: int | None = None
    client = openai.OpenAI(api_key="any", base_url=f"{url}/v1")
    event: Any = None
    with client.realtime.connect(model="sim") as connection:
        connection.conversation.item.create(item=item("hello"))
        connection.response.create(response={"max_output_tokens": 8})
        try:
            while True:
                event = connection.recv()
                if done(event, seen):
                    sys.stderr.write("answered\n")
                if event.type == DRAINING:
                    notice = event.to_dict()
        except websockets.exceptions.ConnectionClosed as exc:
            code = exc.rcvd.code if exc.rcvd else None
    return {"seen": seen, "notice": notice, "code": code}


if __name__ == "__main__":
    kind, url = sys.argv[1:]
    ways: dict[str, Callable[[str], Any]] = {"sync": sync, "drain": drain}
    ways["async"] = lambda url: asyncio.run(in_asyncio(url))
    sys.stdout.write(json.dumps(ways[kind](url)) + "\n")
