"""``mlx_mtp server``, in which a request says what the model says.

- ``chat_template_kwargs: {"say": TEXT}``: that text, token by token.
- A temperature of 1.25: nothing, it fails as mlx-lm's compiled samplers can.
- A temperature of 1.0625: nothing, a pass fails on the GPU; of 1.03125, also plain passes after it.
"""

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import mlx.core as mx

from mlx_mtp.checkpoint import load
from mlx_mtp.errors import FAILED_PASS
from mlx_mtp.server import frontend, serve
from mlx_mtp.server.engine import engine
from mlx_mtp.server.engine.admission import Admission

make_sampler = Admission.make_sampler


@partial(mx.compile, inputs=mx.random.state, outputs=mx.random.state)
def fail(logprobs):
    mx.random.categorical(logprobs)
    raise ValueError("This sampler fails.")


def lose_device(logprobs):
    engine.run_token = fail_on_device
    fail_on_device(logprobs)


def fail_on_device(_):
    raise RuntimeError(f"[METAL] {FAILED_PASS}: Impacting Interactivity (0000000e).")


class Say:
    """A sampler that chooses one token after the other, whatever is drafted: an object, which is called once a token."""

    def __init__(self, tokens, end):
        self.tokens, self.end = iter(tokens), end

    def __call__(self, logprobs):
        return mx.array([next(self.tokens, self.end)])


def choose(self, request, make_sampler=make_sampler, say=Say):
    args, tokenizer = request.args, self.models.tokenizer
    if "say" in (args.chat_template_kwargs or {}):
        return say(tokenizer.encode(args.chat_template_kwargs["say"], add_special_tokens=False), tokenizer.eos_token_id)
    return {1.25: fail, 1.0625: fail_on_device, 1.03125: lose_device}.get(args.sampling.temperature) or make_sampler(
        self, request
    )


def serve_script(text_of: Callable[[Any], tuple[str, bool]], say: type[Say] = Say) -> None:
    """Run a server whose model says a text to each request, which begins with a thought or not."""
    encode = frontend.encode

    def encode_scripted(tokenizer: Any, request: Any, *args: Any) -> Any:
        request.args.chat_template_kwargs = said(*text_of(request))["chat_template_kwargs"]
        return encode(tokenizer, request, *args)

    Admission.make_sampler, frontend.encode = partialmethod(choose, say=say), encode_scripted
    serve.main()


def said(text: str, thinking: bool = False) -> dict[str, Any]:
    """The fields of a request for this text."""
    return {"chat_template_kwargs": {"say": text, "enable_thinking": thinking}}


if __name__ == "__main__":
    Admission.make_sampler = choose
    load.ensure_tested = lambda *_: None  # seconds
    serve.LAST_ANSWERS = 2  # seconds that a template without an end runs
    serve.main()
