"""Batches for the tests: scripted drafts, and what a generator yields."""

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
from helpers import assert_cache_of, mtp, plain

from mlx_mtp.batch.generator import BatchGenerator, Response


class ScriptedRows:
    """A model whose draft of token i of a sequence is right where ``right(uid, i)``, and another token elsewhere.

    The head itself runs, so that its keys and values are filled as ever; only what its lm_head says is the script's. Prompts
    must begin with an empty prompt cache.

    Args:
        truth (Dict[int, List[int]]): The text of each sequence, prompt included, by uid.
    """

    def __init__(self, model, truth: dict[int, list[int]], right: Callable[[int, int], bool]):
        self._model, self._truth, self._right = model, truth, right
        self.batch = None  # set once there is one

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *args, **kwargs):
        return self._model(*args, **kwargs)

    def draft_logits(self, hidden):
        logits = self._model.draft_logits(hidden)
        V = logits.shape[-1]
        drafts = []
        # A row whose last pair is (hidden state n - 1, token n) guesses token n + 1.
        for row, n in zip(self.batch.rows, self.batch.drafter.rows.lengths):
            truth = self._truth[row.uid]
            token = truth[n + 1] if n + 1 < len(truth) else 0
            drafts.append(token if self._right(row.uid, n + 1) else (token + 1) % V)
        return 0 * logits + 10 * (mx.arange(V) == mx.array(drafts)[:, None, None])


@dataclass
class Text:
    """What a generator has yielded of a sequence."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    last: Response | None = None
    n_from_draft: int = 0

    def add(self, r: Response) -> None:
        assert self.finish_reason is None
        if r.logprobs is not None:
            self.tokens.append(r.token)
        self.n_from_draft += r.from_draft
        self.finish_reason, self.last = r.finish_reason, r


def run(generator: BatchGenerator, texts: dict[int, Text] | None = None, n_steps: int = 100_000) -> dict[int, Text]:
    """The texts of all sequences by uid, after as many steps."""
    texts = {} if texts is None else texts
    for _ in range(n_steps):
        if len(generator) == 0:
            break
        for r in generator.next()[1]:
            texts.setdefault(r.uid, Text()).add(r)
    return dict(sorted(texts.items()))


def scripted(model, prompts, max_tokens, right, k, **kwargs) -> tuple[BatchGenerator, list[int]]:
    """A generator with a head that is right where ``right(uid, i)``, of prompts whose texts it makes out first."""
    truth = {uid: p + plain(p, model, max_tokens=n + 10) for uid, (p, n) in enumerate(zip(prompts, max_tokens))}
    wrapped = ScriptedRows(model, truth, right)
    insert = {
        name: kwargs.pop(name) for name in [*kwargs] if name in ("samplers", "logits_processors", "stop_sequences")
    }
    generator = BatchGenerator(wrapped, num_draft_tokens=k, **kwargs)
    wrapped.batch = generator.batch
    return generator, generator.insert(prompts, max_tokens=max_tokens, **insert)


class Fault(Exception):
    pass


class Faulty:
    """Allows even tokens after an even number of tokens and odd ones after an odd; raises at the n-th use of a hook.

    Args:
        hook (str): ``call``, ``copy`` or ``rollback``.
        n (int): Its uses before the one that raises.
        has (Collection[str]): The hooks beside ``call`` that it has.
        left (List[int]): Shared with the copies.
    """

    def __init__(self, hook: str, n: int, has=()):
        self.hook, self.left, self.has = hook, [n], has

    def _use(self, hook):
        if hook == self.hook:
            self.left[0] -= 1
            if self.left[0] < 0:
                raise Fault(hook)

    def __getattr__(self, name):
        if name in ("copy", "rollback") and name in self.__dict__.get("has", ()):
            return getattr(self, f"_{name}")
        raise AttributeError(name)

    def __call__(self, tokens, logits):
        self._use("call")
        return mx.where(mx.arange(logits.shape[-1]) % 2 == len(tokens) % 2, logits, -mx.inf)

    def _copy(self):
        self._use("copy")
        return self

    def _rollback(self, n):
        self._use("rollback")


def assert_goes_on(model, prompt_cache, tokens):
    """A complete prompt cache, which goes on as these tokens do."""
    assert_cache_of(model, prompt_cache, len(tokens))
    assert mtp([7], model, max_tokens=4, prompt_cache=prompt_cache) == plain([*tokens, 7], model, max_tokens=4)
