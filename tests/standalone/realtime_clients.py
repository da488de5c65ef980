"""OpenAI's SDK as it is, in a process of its own (half of it runs on asyncio).

Usage: ``python realtime_clients.py sync|async|drain|busy URL``, or ``replay URL NOTICE``. Prints
one line of JSON.
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


def drain(url: str, most: int = 8, answered: str = "response.done") -> Any:
    """Talk until the server stops; say so when that much of the answer is there."""
    seen: list[list[str]] = []
    notice: Any = None
    response: Any = None
    code: int | None = None
    client = openai.OpenAI(api_key="any", base_url=f"{url}/v1")
    event: Any = None
    with client.realtime.connect(model="sim") as connection:
        connection.conversation.item.create(item=item("hello"))
        connection.response.create(response={"max_output_tokens": most})
        try:
            while True:
                event = connection.recv()
                if done(event, seen):
                    response = event.response.to_dict()
                if event.type == answered:
                    sys.stderr.write("answered\n")
                if event.type == DRAINING:
                    notice = event.to_dict()
        except websockets.exceptions.ConnectionClosed as exc:
            code = exc.rcvd.code if exc.rcvd else None
    return {"seen": seen, "notice": notice, "response": response, "code": code}


def busy(url: str) -> Any:
    """The same, in the middle of an answer."""
    return drain(url, 1900, "response.output_text.delta")


def replay(url: str, notice: str) -> Any:
    """Go on with a conversation where the notice of another server has left it."""
    told: Any = json.loads(notice)
    errors: list[Any] = []
    client = openai.OpenAI(api_key="any", base_url=f"{url}/v1")
    event: Any = None
    with client.realtime.connect(model=told["session"]["model"]) as connection:
        connection.session.update(session=told["session"])
        for said in told["items"]:
            connection.conversation.item.create(item=said)
        connection.conversation.item.create(item=item("and then?"))
        connection.response.create(response={"max_output_tokens": 8})
        for event in connection:
            if event.type == "error":
                errors.append(event.to_dict())
            if event.type == "response.done":
                break
    return {"errors": errors, "response": event.response.to_dict()}


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    ways: dict[str, Callable[..., Any]] = {"sync": sync, "drain": drain, "busy": busy}
    ways |= {"async": lambda url: asyncio.run(in_asyncio(url)), "replay": replay}
    sys.stdout.write(json.dumps(ways[kind](*arguments)) + "\n")
