"""What a batch generator yields, and hooks that raise."""

from dataclasses import dataclass, field

import mlx.core as mx

from mlx_mtp.batch.generator import BatchGenerator, Response


@dataclass
class Text:
    """What a generator has yielded of a sequence."""

    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)  # of each token
    finish_reason: str | None = None
    last: Response | None = None

    def add(self, r: Response) -> None:
        assert self.finish_reason is None
        if r.logprobs is not None:
            self.tokens.append(r.token)
            self.from_draft.append(r.from_draft)
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


class Fault(Exception):
    pass


def failing_sampler(n: int):
    """Greedy; raises at its n-th call."""
    calls = []

    def sampler(logprobs):
        calls.append(logprobs)
        if len(calls) == n:
            raise Fault
        return mx.argmax(logprobs, axis=-1)

    return sampler


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
                raise Fault(hook) if self.left[0] == -1 else AssertionError(f"{hook} is used again after it has raised")

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
