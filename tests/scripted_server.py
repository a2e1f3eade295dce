"""``mlx_mtp.server``, in which ``chat_template_kwargs: {"say": TEXT}`` is what the model says, token by token."""

import mlx.core as mx

from mlx_mtp.server import __main__
from mlx_mtp.server.engine import ResponseGenerator

make_sampler = ResponseGenerator._make_sampler


def choose(self, args):
    text = (args.chat_template_kwargs or {}).get("say")
    if text is None:
        return make_sampler(self, args)
    tokenizer = self.model_provider.tokenizer
    tokens = iter(tokenizer.encode(text, add_special_tokens=False))
    return lambda logprobs: mx.array([next(tokens, tokenizer.eos_token_id)])


ResponseGenerator._make_sampler = choose

if __name__ == "__main__":
    __main__.main()
