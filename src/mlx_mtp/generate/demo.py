"""The command line of ``mlx_mtp demo``: one prompt without and with drafts, both speeds, and the source of each token."""

from collections import Counter

from ..checkpoint import DEMO, DEMO_NOTE
from ..checkpoint.load import load
from ..cli.display import alternate, one_line_errors, paint, table
from ..cli.parser import parse
from ..cli.parsers import REQUEST, demo_parser
from ..core.drafts.sources import source_of
from ..errors import MTPError
from ..prompts import encode
from .stream import GenerationResponse, stream_generate

# The demo completes Python. The prompt does not end with white space, since mlx-lm drops white space at the start of a text.
CODE = '''class Queue:
    """A queue of items."""

    def __init__(self):
        self.items = []


class Stack:
    """A stack of items."""

    def __init__('''
PLAIN = "plain mlx-lm"
DRAFTED = "with drafts"
ROUNDS = 3  # the runs of the median speeds are shown
Run = list[GenerationResponse]


@one_line_errors("mlx_mtp demo")
def main() -> None:
    args = parse(demo_parser())
    if args.max_tokens < 2:
        raise MTPError(f"--max-tokens must be 2 or more, not {args.max_tokens}: times start at the first token.")
    model, tokenizer = load(args.model, mtp="auto", dtype=args.dtype)
    is_demo = args.model == str(DEMO)
    prompt = args.prompt or (CODE if is_demo else REQUEST)
    tokens = encode(tokenizer, prompt, enable_thinking=False)
    runs = {PLAIN: False, DRAFTED: True}

    def one(_: str, run: str) -> Run:
        return list(stream_generate(model, tokenizer, tokens, args.max_tokens, mtp=runs[run]))

    rounds = alternate([*runs], ["the prompt"], ROUNDS, one)
    plain, drafted = (sorted((made["the prompt", run] for made in rounds), key=speed)[ROUNDS // 2] for run in runs)
    if is_demo:
        print(f"{DEMO_NOTE}.\n")
    print(paint(prompt, "prompt"), end="" if is_demo else "\n\n")
    print("".join(paint(r.text, r.source) for r in drafted) + "\n")
    ratio = speed(drafted) / speed(plain)
    last = drafted[-1]
    counts = Counter(r.source for r in drafted)
    for source in ("model", *last.counts):
        name = "the model's own" if source == "model" else source_of(source)[0]
        made, accepted = map(sum, last.counts.get(source, ((), ())))
        share = f", {accepted / made:.0%} of {made} drafts accepted" if made else ""
        print(f"{paint(name, source)}: {counts[source]} tokens{share}")
    print(f"\n{figures(plain, drafted, ratio)}\n\n{next_step(args.model, is_demo, ratio)}")


def speed(responses: Run) -> float:
    return responses[-1].generation_tps


def figures(plain: Run, drafted: Run, ratio: float) -> str:
    rows = [["", "tokens/s", "passes of the model"]]
    for name, responses in ((PLAIN, plain), (DRAFTED, drafted)):
        rows.append([name, f"{speed(responses):.1f}", str(sum(not r.from_draft for r in responses))])
    same = f"Both texts are the same {len(plain)} tokens."
    if [r.token for r in plain] != [r.token for r in drafted]:
        same = "The texts differ: `mlx_mtp generate --mtp --check` shows whether that is rounding."
    return "\n".join([*table(rows), "", f"{ratio:.2f} times as fast. {same}"])


def next_step(model: str, is_demo: bool, ratio: float) -> str:
    if is_demo:
        return "Next: `mlx_mtp models` lists real models, then `mlx_mtp demo --model NAME`."
    if ratio < 1:
        return f"Next: `mlx_mtp benchmark --tune --model {model}` looks for faster settings."
    return f"Next: `mlx_mtp chat --mtp --model {model}`"
