"""The libraries of Python against a server whose model does what it is told: python clients.py URL KEY [LIBRARY...]

Prints a line of JSON for each check: [library, check, what is wrong, or ""].
"""

import asyncio
import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from enum import Enum
from typing import Any, Literal

import instructor
import litellm
from agents import Agent as OpenAIAgent
from agents import (
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from anthropic import AsyncAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as ResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, *WANTED = sys.argv[1:]
ROOT = URL.removesuffix("/v1")
GPT, CLAUDE = "gpt-5", "claude-sonnet-5"  # as which the libraries know what to send
set_tracing_disabled(True)


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(int(a + b))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def openai_of(key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=URL, api_key=key, max_retries=0)


# Each class is a library: how it asks for what is tried. What a library does not do, it lacks.


class LangChain:
    thought = None

    def __init__(self, key: str, **fields: Any):
        self.model = ChatOpenAI(model=GPT, base_url=URL, api_key=key, max_retries=0, **fields)

    async def whole(self, text: str) -> tuple[str, str | None]:
        answer = await self.model.ainvoke(text)
        thoughts = [block["reasoning"] for block in answer.content_blocks if block["type"] == "reasoning"]
        return answer.text, next(iter(thoughts), None)

    async def stream(self, text: str, heard: Callable[[], None]) -> str:
        said = ""
        async for piece in self.model.astream(text):
            said += piece.text
            heard()
        return said

    async def loop(self, text: str) -> str:
        messages = [HumanMessage(text)]
        while True:
            messages.append(await self.model.bind_tools([add]).ainvoke(messages))
            if not messages[-1].tool_calls:
                return messages[-1].text
            messages += [ToolMessage(add(**call["args"]), tool_call_id=call["id"]) for call in messages[-1].tool_calls]

    async def fill(self, text: str, schema: type[BaseModel]) -> BaseModel:
        return await self.model.with_structured_output(schema, method="json_schema").ainvoke(text)

    async def second(self, first: str, text: str) -> str:
        messages = [HumanMessage(first), await self.model.ainvoke(first), HumanMessage(text)]
        return (await self.model.ainvoke(messages)).text


class LangChainResponses(LangChain):
    thought = "Hm."

    def __init__(self, key: str):
        super().__init__(key, use_responses_api=True, reasoning={"summary": "auto"})


class LangChainTools(LangChain):
    async def fill(self, text: str, schema: type[BaseModel]) -> BaseModel:
        return await self.model.with_structured_output(schema, method="function_calling").ainvoke(text)


class PydanticAI:
    output: Any = NativeOutput

    def model(self, key: str) -> Any:
        return OpenAIChatModel(GPT, provider=OpenAIProvider(openai_client=openai_of(key)))

    def __init__(self, key: str):
        settings = {"openai_reasoning_summary": "auto", "max_tokens": 2000}
        self.agent = Agent(self.model(key), model_settings=settings)
        self.agent.tool_plain(add)

    async def whole(self, text: str) -> tuple[str, str]:
        result = await self.agent.run(text)
        (thought,) = (x for x in result.all_messages()[-1].parts if isinstance(x, ThinkingPart))
        return result.output, thought.content

    async def stream(self, text: str, heard: Callable[[], None]) -> str:
        async with self.agent.run_stream(text) as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                heard()
            return await result.get_output()

    async def loop(self, text: str) -> str:
        return (await self.agent.run(text)).output

    async def fill(self, text: str, schema: type[BaseModel]) -> BaseModel:
        return (await Agent(self.agent.model, output_type=self.output(schema)).run(text)).output

    async def second(self, first: str, text: str) -> str:
        result = await self.agent.run(first)
        return (await self.agent.run(text, message_history=result.all_messages())).output


class PydanticAITools(PydanticAI):
    output = staticmethod(lambda schema: schema)


class PydanticAIResponses(PydanticAI):
    def model(self, key: str) -> Any:
        return ResponsesModel(GPT, provider=OpenAIProvider(openai_client=openai_of(key)))


class PydanticAIAnthropic(PydanticAI):
    lacks = ("Record",)  # whose properties it closes

    def model(self, key: str) -> Any:
        client = AsyncAnthropic(base_url=ROOT, api_key=key, max_retries=0)
        return AnthropicModel(CLAUDE, provider=AnthropicProvider(anthropic_client=client))


class Instructor:
    mode = instructor.Mode.TOOLS

    def __init__(self, key: str):
        self.client = instructor.from_openai(openai_of(key), mode=self.mode)

    async def fill(self, text: str, schema: type[BaseModel]) -> BaseModel:
        options = dict(response_model=schema, model=GPT, messages=[user(text)], max_retries=0)
        return await self.client.chat.completions.create(**options)


class InstructorJSON(Instructor):
    mode = instructor.Mode.JSON_SCHEMA


class InstructorResponses(Instructor):
    mode = instructor.Mode.RESPONSES_TOOLS


class LiteLLM:
    model, base = f"openai/{GPT}", URL

    def __init__(self, key: str):
        self.options = {
            "model": self.model,
            "api_base": self.base,
            "api_key": key,
            "max_retries": 0,
            "max_tokens": 2000,
        }

    async def ask(self, *messages: Any, **options: Any) -> Any:
        return await litellm.acompletion(messages=list(messages), **self.options, **options)

    async def whole(self, text: str) -> tuple[str, str]:
        message = (await self.ask(user(text))).choices[0].message
        return message.content, message.reasoning_content

    async def stream(self, text: str, heard: Callable[[], None]) -> str:
        said = ""
        async for piece in await self.ask(user(text), stream=True):
            said += piece.choices[0].delta.content or ""
            heard()
        return said

    async def loop(self, text: str) -> str:
        parameters = {"type": "object", "properties": {x: {"type": "number"} for x in "ab"}, "required": ["a", "b"]}
        tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
        messages = [user(text)]
        while True:
            messages.append((await self.ask(*messages, tools=tools)).choices[0].message)
            if not messages[-1].tool_calls:
                return messages[-1].content
            for call in messages[-1].tool_calls:
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    async def fill(self, text: str, schema: type[BaseModel]) -> BaseModel:
        answer = await self.ask(user(text), response_format=schema)
        return schema.model_validate_json(answer.choices[0].message.content)

    async def second(self, first: str, text: str) -> str:
        message = (await self.ask(user(first))).choices[0].message
        return (await self.ask(user(first), message, user(text))).choices[0].message.content


class LiteLLMAnthropic(LiteLLM):
    model, base = f"anthropic/{CLAUDE}", ROOT
    lacks = ("Recursive",)  # whose definition it drops


class OpenAIAgents:
    kind: Any = OpenAIResponsesModel

    def __init__(self, key: str):
        model, settings = self.kind(GPT, openai_of(key)), ModelSettings(reasoning=Reasoning(summary="auto"))
        self.options = {"name": "a", "model": model, "model_settings": settings}
        self.agent = OpenAIAgent(**self.options, tools=[function_tool(add)])

    async def whole(self, text: str) -> tuple[str, str]:
        result = await Runner.run(self.agent, text)
        return result.final_output, result.new_items[0].raw_item.summary[0].text

    async def stream(self, text: str, heard: Callable[[], None]) -> str:
        result = Runner.run_streamed(self.agent, text)
        try:
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    heard()
        finally:
            result.cancel()
        return result.final_output

    async def loop(self, text: str) -> str:
        return (await Runner.run(self.agent, text)).final_output

    async def fill(self, text: str, schema: type[BaseModel]) -> BaseModel:
        output = AgentOutputSchema(schema, strict_json_schema=False)
        return (await Runner.run(OpenAIAgent(**self.options, output_type=output), text)).final_output

    async def second(self, first: str, text: str) -> str:
        session = SQLiteSession("a")
        await Runner.run(self.agent, first, session=session)
        return (await Runner.run(self.agent, text, session=session)).final_output


class OpenAIAgentsChat(OpenAIAgents):
    kind = OpenAIChatCompletionsModel


LIBRARIES = {
    "langchain": LangChain,
    "langchain responses": LangChainResponses,
    "langchain tools": LangChainTools,
    "pydantic-ai": PydanticAI,
    "pydantic-ai tools": PydanticAITools,
    "pydantic-ai responses": PydanticAIResponses,
    "pydantic-ai anthropic": PydanticAIAnthropic,
    "instructor": Instructor,
    "instructor json": InstructorJSON,
    "instructor responses": InstructorResponses,
    "litellm": LiteLLM,
    "litellm anthropic": LiteLLMAnthropic,
    "openai-agents": OpenAIAgents,
    "openai-agents chat": OpenAIAgentsChat,
}


class Size(Enum):
    SMALL = "s"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Plain(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)
    alive: bool


class Nested(BaseModel):
    pets: list[Dog] = Field(max_length=3)
    size: Size


class Nullable(BaseModel):
    note: str | None = None
    n: float | None


class Discriminated(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")


class Union(BaseModel):
    value: int | str | bool


class Recursive(BaseModel):
    value: int
    children: list["Recursive"]


class Record(BaseModel):
    of_names: dict[str, int]
    of_sizes: dict[Size, int]


class Tuple(BaseModel):
    point: tuple[float, str]


class Described(BaseModel):
    a: str = Field(description="A.", examples=["b"], deprecated=True)


class Constrained(BaseModel):
    n: float = Field(multiple_of=0.5, gt=1)
    code: str = Field(pattern=r"^[A-Z]{3}-\d+$")
    at: date


VALUES = [
    Plain(name="Ann", age=3, alive=True),
    Nested(pets=[Dog(name="Rex")], size=Size.SMALL),
    Nullable(n=1.5),
    Discriminated(pet=Dog(name="Rex")),
    Union(value="x"),
    Recursive(value=1, children=[Recursive(value=2, children=[])]),
    Record(of_names={"x": 1}, of_sizes={Size.SMALL: 2}),
    Tuple(point=(1.0, "a")),
    Described(a="b"),
    Constrained(n=1.5, code="ABC-1", at=date(2026, 1, 31)),
]
LONG, TOO_LONG = "word " * 1000, "word " * 5000


async def check(library: str, name: str, found: Any, expected: Any) -> None:
    wrong = ""
    try:
        got = await found
        if (got.model_dump() if isinstance(got, BaseModel) else got) != expected:
            wrong = f"{got!r:.300}, not {expected!r}"
    except Exception as e:
        wrong = f"{type(e).__name__}: {e!s:.500}"
    print(json.dumps([library, name, wrong]), flush=True)


class Enough(Exception):
    """Ends a stream."""


async def heard(stream: Any, text: str, most: float = math.inf) -> tuple[str, bool]:
    """What a stream says, and whether it comes in pieces; or nothing, if it ends before more than ``most`` of them."""
    n = 0

    def hear() -> None:
        nonlocal n
        n += 1
        if n > most:
            raise Enough

    with suppress(Enough):
        return await stream(text, hear), n > 2
    return "", True


async def status(asked: Any) -> Any:
    """The HTTP status of the error, in itself or what it comes from."""
    try:
        return await asked
    except Exception as error:
        e: Any = error
        while e is not None and not hasattr(e, "status_code"):
            e = e.__cause__ or e.__context__
        return getattr(e, "status_code", repr(error))


async def main() -> None:
    for name in (name for name in LIBRARIES if name in WANTED or not WANTED):
        library, stranger = LIBRARIES[name](KEY), LIBRARIES[name]("wrong")
        for value in (x for x in VALUES if type(x).__name__ not in getattr(library, "lacks", ())):
            text = f"FILL {value.model_dump_json()}"
            await check(name, f"schema {type(value).__name__}", library.fill(text, type(value)), value.model_dump())
        await check(name, "wrong key", status(stranger.fill("FILL {}", Plain)), 401)
        if hasattr(library, "whole"):
            said = "Yes, I do.", getattr(library, "thought", "Hm.")
            await check(name, "whole", library.whole("SAY Yes, I do."), said)
            await check(name, "stream", heard(library.stream, "SAY Yes, I do."), ("Yes, I do.", True))
            await check(name, "tools", library.loop("ADD"), "The sum is 4.")
            await check(name, "abort", heard(library.stream, f"SAY {LONG}", most=2), ("", True))
            await check(name, "too long", status(library.whole(f"SAY {TOO_LONG}")), 400)
            await check(name, "second turn", library.second("SAY I am here.", "REPEAT"), "I am here.")


asyncio.run(main())
