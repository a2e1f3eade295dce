"""The answers to one request: each is generated as a request of its own, and those to one prompt read it once."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm import server as stock

from .engine import ResponseGenerator, Waiting
from .job import Delta
from .request import Request


@dataclass
class Choice:
    """An answer.

    Args:
        request (Request): What it is generated for.
        args (GenerationArguments): mlx-lm's.
        is_first (bool): Whether it is the first one to its prompt.
    """

    request: Request
    args: stock.GenerationArguments
    is_first: bool
    context: stock.GenerationContext | None = None


def choices_of(request: Request, args: stock.GenerationArguments) -> list[Choice]:
    """The answers that a request asks for, ``n`` to each prompt. Number i has the request's seed plus i."""
    choices: list[Choice] = []
    for prompt in (request.prompt, *request.more_prompts):
        for i in range(request.n):
            n = len(choices)
            seed = None if args.seed is None else (args.seed + n) % 2**64
            choices.append(Choice(request if n == 0 else request.again(prompt), replace(args, seed=seed), i == 0))
    return choices


async def generate(
    generator: ResponseGenerator, choices: list[Choice]
) -> AsyncIterator[tuple[int, stock.GenerationContext | Waiting | Delta]]:
    """What the answers become, each with its number; see ``ResponseGenerator.generate``.

    The first answer to a prompt reads it. The others begin with that one's first token and find the prompt in the prompt cache.

    Raises:
        ApiError: One of them cannot be generated.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue()
    has_read = [asyncio.Event() for choice in choices if choice.is_first]
    n_of_each = len(choices) // len(has_read)

    async def run(i: int, choice: Choice) -> None:
        read = has_read[i // n_of_each]
        try:
            if not choice.is_first:
                await read.wait()
            async for item in generator.generate(choice.request, choice.args):
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
            if isinstance(item, stock.GenerationContext):
                choices[i].context = item
            yield i, item
    finally:
        for task in tasks:
            task.cancel()
