"""``mlx_lm.server``, in which a request says what the model says: ``chat_template_kwargs: {"say": TEXT}``."""

from mlx_lm import server

from tests.support.scripted_server import Say


def say(args, tokenizer):
    text = args.chat_template_kwargs["say"]
    return Say(tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)


if __name__ == "__main__":
    server._make_sampler = say
    server.main()
