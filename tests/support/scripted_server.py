"""``mlx_mtp.server``, in which ``chat_template_kwargs: {"say": TEXT}`` is what the model says, token by token."""

import mlx.core as mx
from mlx_lm import server as stock

from mlx_mtp.server import __main__
from mlx_mtp.server.engine import ResponseGenerator

make_sampler = ResponseGenerator._make_sampler


def say(args, tokenizer):
    tokens = iter(tokenizer.encode(args.chat_template_kwargs["say"], add_special_tokens=False))
    return lambda logprobs: mx.array([next(tokens, tokenizer.eos_token_id)])


def choose(self, args):
    is_scripted = "say" in (args.chat_template_kwargs or {})
    return say(args, self.model_provider.tokenizer) if is_scripted else make_sampler(self, args)


ResponseGenerator._make_sampler = choose
stock._make_sampler = say  # of mlx-lm's own loop

if __name__ == "__main__":
    __main__.main()
