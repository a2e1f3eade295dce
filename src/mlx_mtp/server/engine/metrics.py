"""The server's metrics, for Prometheus."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ...decoding.counts import DraftCounts
from ...memory import Account

NAMESPACE = "mlx_mtp"  # every metric's name begins with it
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()  # one for each server, not for the process
        counter = partial(Counter, namespace=NAMESPACE, registry=registry)
        gauge = partial(Gauge, namespace=NAMESPACE, registry=registry)
        histogram = partial(Histogram, namespace=NAMESPACE, registry=registry)
        self.requests = counter("requests", "Requests answered, by HTTP status.", ["status"])
        self.in_flight = gauge("requests_in_flight", "Requests being generated.")
        self.queue_length = gauge("queue_length", "Requests waiting.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self.cached_prompt_tokens = counter("cached_prompt_tokens", "Prompt tokens found in the prompt cache.")
        self.cache_hits = counter("prompt_cache_hits", "Prompts with tokens found in the prompt cache.")
        self.generated_tokens = counter("generated_tokens", "Tokens generated.")
        self.drafted_tokens = counter("drafted_tokens", "Drafts of the head, by position in the window.", ["position"])
        self.accepted_tokens = counter("accepted_tokens", "Accepted drafts, by position.", ["position"])
        self.copied_tokens = counter("copied_tokens", "Drafts copied from the text.")
        self.accepted_copied_tokens = counter("accepted_copied_tokens", "Accepted drafts copied from the text.")
        self.forced_tokens = counter("forced_tokens", "Drafts forced by a grammar.")
        self.accepted_forced_tokens = counter("accepted_forced_tokens", "Accepted drafts forced by a grammar.")
        self.depth = gauge("depth", "Drafts in the latest step, by the number of requests at once.", ["requests"])
        self.drafted_by_size = counter(
            "batch_drafted_tokens", "Drafts, by the number of requests at once.", ["requests"]
        )
        self.accepted_by_size = counter(
            "batch_accepted_tokens", "Accepted drafts, by the number of requests at once.", ["requests"]
        )
        self.mode_switches = counter(
            "mode_switches", "Switches of a sequence between running alone and in a batch.", ["to"]
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=SECONDS
        )
        self.n_generating = 0  # in the latest step
        self.rate = histogram("tokens_per_second", "Speed of a request, without steps that compile.", buckets=RATES)

    @contextmanager
    def step(self, counts: Sequence[DraftCounts]) -> Iterator[None]:
        """Count the drafts of a step for these requests."""
        drafted, accepted = _totals(counts)
        yield
        size, (drafted_now, accepted_now) = len(counts), _totals(counts)
        self.depth.labels(size).set(max(c.depth for c in counts))
        self.drafted_by_size.labels(size).inc(drafted_now - drafted)
        self.accepted_by_size.labels(size).inc(accepted_now - accepted)

    def count_switches(self, n_generating: int) -> None:
        """Count switches between one sequence and several, by the number of sequences in a step."""
        if n_generating > 1 >= self.n_generating:
            self.mode_switches.labels("batch").inc()
        elif n_generating == 1 < self.n_generating:
            self.mode_switches.labels("mtp").inc()
        self.n_generating = n_generating

    def begin(self, n_prompt: int, n_cached: int, n_running: int) -> None:
        """Count a request that begins: its prompt's tokens, the cached tokens, and the running requests."""
        self.prompt_tokens.inc(n_prompt)
        self.cached_prompt_tokens.inc(n_cached)
        self.cache_hits.inc(n_cached > 0)
        self.in_flight.set(n_running)

    def finish(self, counts: DraftCounts, n_running: int) -> None:
        """Count a request that ends: its drafts, its speed if known, and the requests that still run."""
        self.in_flight.set(n_running)
        if (speed := counts.tokens_per_second) is not None:
            self.rate.observe(speed)
        for position, (drafted, accepted) in enumerate(zip(counts.drafted, counts.accepted), 1):
            self.drafted_tokens.labels(position).inc(drafted)
            self.accepted_tokens.labels(position).inc(accepted)
        self.copied_tokens.inc(sum(counts.copied))
        self.accepted_copied_tokens.inc(sum(counts.copies_accepted))
        self.forced_tokens.inc(sum(counts.forced))
        self.accepted_forced_tokens.inc(sum(counts.forced_accepted))

    def watch_memory(self, account: Account) -> None:
        for name, text, value in (
            ("limit", "Memory limit of the server.", lambda: account.limit),
            ("held", "Memory used by the server.", lambda: account.held),
            ("active", "Memory of MLX's arrays.", lambda: account.active),
            ("buffers", "Memory kept by MLX for new arrays.", lambda: account.buffers),
        ):
            gauge = Gauge(f"memory_{name}_bytes", text, namespace=NAMESPACE, registry=self.registry)
            gauge.set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _totals(counts: Sequence[DraftCounts]) -> tuple[int, int]:
    """(drafts, accepted drafts)"""
    return sum(c.n_drafted for c in counts), sum(c.n_accepted for c in counts)
