"""The answers to one request: each is generated as a request of its own, and their prompt is prefilled once."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from .engine.delta import Delta
from .engine.frontend import Frontend
from .request import Request, Started, Waiting


def choices_of(request: Request) -> list[Request]:
    """The answers that a request asks for, ``n`` to each prompt, itself first. Number i has the request's seed plus i."""
    prompts = [prompt for prompt in (request.prompt, *request.more_prompts) for _ in range(request.n)]
    choices, seed = [request, *(request.again(prompt) for prompt in prompts[1:])], request.args.seed
    for i, choice in enumerate(choices):
        choice.args = replace(request.args, seed=None if seed is None else (seed + i) % 2**64)
    return choices


async def generate(frontend: Frontend, choices: list[Request]) -> AsyncIterator[tuple[int, Started | Waiting | Delta]]:
    """The items of all answers, each with the answer's number; see ``Frontend.generate``.

    The first answer to a prompt prefills it. The others begin at its first token, and find the prompt in the prompt cache.

    Raises:
        ApiError: One of them cannot be generated.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue()
    n_of_each = choices[0].n
    has_read = [asyncio.Event() for _ in choices[::n_of_each]]

    async def run(i: int, choice: Request) -> None:
        read = has_read[i // n_of_each]
        try:
            if i % n_of_each > 0:
                await read.wait()
            async for item in frontend.generate(choice):
                if isinstance(item, Delta):
                    read.set()
                queue.put_nowait((i, item))
            queue.put_nowait((i, None))
        except Exception as e:
            queue.put_nowait((i, e))
        read.set()

    tasks = [asyncio.create_task(run(i, choice)) for i, choice in enumerate(choices)]
    try:
        n_open = len(tasks)
        while n_open > 0:
            i, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_open -= 1
                continue
            yield i, item
    finally:
        for task in tasks:
            task.cancel()
