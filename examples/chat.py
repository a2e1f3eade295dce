"""Chat with a model in the terminal, drafting with its MTP head.

    python examples/chat.py --model PATH_OR_REPO
    mlx.launch --hostfile HOSTS -- python examples/chat.py --model PATH_OR_REPO

One prompt cache holds the whole conversation, so each turn reads only its new tokens. While an answer is written, the last line
of the terminal shows tokens per step and per second. q exits, r resets the chat, h prints help; Ctrl-C stops an answer.
"""

import argparse
import os
import shutil
import sys
from contextlib import suppress

import mlx.core as mx

from mlx_mtp import DEMO, MAX_DRAFT_TOKENS, load, make_prompt_cache, make_sampler, stream_generate

HELP = "The command list:\n- 'q' to exit\n- 'r' to reset the chat\n- 'h' to display these commands"


class StatusLine:
    """The last line of a terminal, fixed below the text that scrolls. Without a terminal it shows nothing."""

    def __init__(self):
        self.rows = shutil.get_terminal_size().lines if sys.stdout.isatty() else 0

    def __enter__(self):
        if self.rows:
            # Make room, scroll all lines but the last, return to the text.
            print(f"\n\033[A\0337\033[1;{self.rows - 1}r\0338", end="", flush=True)
        return self

    def __exit__(self, *exc):
        if self.rows:
            print(f"\0337\033[r\033[{self.rows};1H\033[2K\0338", end="", flush=True)

    def show(self, text: str) -> None:
        if self.rows:
            print(f"\0337\033[{self.rows};1H\033[2K\033[2m{text}\033[0m\0338", end="", flush=True)


def figures(response) -> str:
    return (
        f"{response.generation_tokens} tokens, {response.generation_tps:.1f} tokens-per-sec, "
        f"{response.tokens_per_step:.2f} tokens-per-step"
    )


def encode(tokenizer, query: str, system_prompt: str | None) -> list[int]:
    """The new tokens of the conversation, through the chat template if there is one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(query + "\n")
    messages = [{"role": "user", "content": query}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def answer(model, tokenizer, prompt: list[int], **options) -> None:
    """Stream the answer, then print its figures."""
    response = None
    try:
        with StatusLine() as status:
            for response in stream_generate(model, tokenizer, prompt, **options):
                print(response.text, end="", flush=True)
                status.show(figures(response))
    except KeyboardInterrupt:
        if model.ranks is not None:
            raise  # the others are somewhere else
        # The prompt cache holds the tokens written so far.
    print()
    if response is not None:
        print(f"[{figures(response)}, {len(prompt)} prompt tokens]", flush=True)


def ask(ranks) -> str:
    """What the user asks rank 0 for; q at the end of the input."""
    query = "q"
    if ranks is None or ranks.rank == 0:
        with suppress(EOFError):
            query = input(">> ")
    return query if ranks is None else ranks.share(query)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Chat with an LLM, with the model's own MTP head")
    parser.add_argument("--model", default=str(DEMO), help="Local directory or Hugging Face repo (default: the demo).")
    parser.add_argument("--trust-remote-code", action="store_true", help="Enable trusting remote code for tokenizer")
    parser.add_argument("--adapter-path", help="Optional path for the trained adapter weights and config.")
    parser.add_argument("--temp", type=float, default=0.0, help="Sampling temperature")
    parser.add_argument("--top-p", type=float, default=1.0, help="Sampling top-p")
    parser.add_argument("--seed", type=int, default=0, help="PRNG seed")
    parser.add_argument("--prefill-step-size", type=int, default=2048, help="Prompt tokens to process at a time")
    parser.add_argument("--max-tokens", "-m", type=int, default=256, help="Maximum number of tokens to generate")
    parser.add_argument("--system-prompt", help="System prompt to be used for the chat template")
    parser.add_argument(
        "--num-draft-tokens",
        type=lambda text: text if text == "auto" else int(text),
        choices=("auto", *range(MAX_DRAFT_TOKENS + 1)),
        help="Tokens to draft in a step; 0 is plain decoding (default: the settings of `mlx_mtp.benchmark --tune`, or auto: "
        "chosen at every step for speed).",
    )
    parser.add_argument(
        "--pipeline", action="store_true", help="With mlx.launch, use pipelining instead of tensor parallelism"
    )
    return parser


def run(args: argparse.Namespace, group: mx.distributed.Group) -> None:
    mx.random.seed(args.seed)
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
        tensor_group=None if args.pipeline else group,
        pipeline_group=group if args.pipeline else None,
    )
    print(f"[INFO] Starting chat session with {args.model}.\n{HELP}")
    prompt_cache, first = make_prompt_cache(model), True
    while True:
        query = ask(model.ranks)
        if query == "q":
            break
        if query == "h":
            print(HELP)
        elif query == "r":
            prompt_cache, first = make_prompt_cache(model), True
        elif query:
            answer(
                model,
                tokenizer,
                encode(tokenizer, query, args.system_prompt if first else None),
                max_tokens=args.max_tokens,
                num_draft_tokens=args.num_draft_tokens,
                sampler=make_sampler(args.temp, args.top_p),
                prompt_cache=prompt_cache,
                prefill_step_size=args.prefill_step_size,
            )
            first = False


if __name__ == "__main__":
    group = mx.distributed.init()
    if group.rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the end)
    try:
        run(make_parser().parse_args(), group)
    except (ValueError, OSError) as e:
        if group.rank() == 0:
            print(f"chat: error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
