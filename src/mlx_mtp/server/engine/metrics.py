"""The server's metrics, for Prometheus."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ...decoding.counts import DraftCounts
from ...memory.account import Account

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)


class Metrics:
    """Every metric's name begins with ``mlx_mtp_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()  # one for each server, not for the process
        common: dict[str, Any] = {"namespace": "mlx_mtp", "registry": self.registry}
        self.requests = Counter("requests", "Requests answered, by HTTP status.", ["status"], **common)
        self.in_flight = Gauge("requests_in_flight", "Requests being generated.", **common)
        self.queue_length = Gauge("queue_length", "Requests waiting.", **common)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens.", **common)
        self.cached_prompt_tokens = Counter(
            "cached_prompt_tokens", "Prompt tokens found in the prompt cache.", **common
        )
        self.cache_hits = Counter("prompt_cache_hits", "Prompts with tokens found in the prompt cache.", **common)
        self.generated_tokens = Counter("generated_tokens", "Tokens generated.", **common)
        self.drafted_tokens = Counter(
            "drafted_tokens", "Drafts of the head, by position in the window.", ["position"], **common
        )
        self.accepted_tokens = Counter("accepted_tokens", "Accepted drafts, by position.", ["position"], **common)
        self.copied_tokens = Counter("copied_tokens", "Drafts copied from the text.", **common)
        self.accepted_copied_tokens = Counter(
            "accepted_copied_tokens", "Accepted drafts copied from the text.", **common
        )
        self.forced_tokens = Counter("forced_tokens", "Drafts forced by a grammar.", **common)
        self.accepted_forced_tokens = Counter(
            "accepted_forced_tokens", "Accepted drafts forced by a grammar.", **common
        )
        self.depth = Gauge(
            "depth", "Drafts in the latest step, by the number of requests at once.", ["requests"], **common
        )
        self.drafted_by_size = Counter(
            "batch_drafted_tokens", "Drafts, by the number of requests at once.", ["requests"], **common
        )
        self.accepted_by_size = Counter(
            "batch_accepted_tokens", "Accepted drafts, by the number of requests at once.", ["requests"], **common
        )
        self.mode_switches = Counter(
            "mode_switches", "Switches of a sequence between running alone and in a batch.", ["to"], **common
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=SECONDS, **common
        )
        self.n_generating = 0  # in the latest step
        self.rate = Histogram("tokens_per_second", "Speed of a request after its first token.", buckets=RATES, **common)

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
        """Count where a sequence gets company, and where one is left alone, by the number of sequences in a step."""
        if n_generating > 1 >= self.n_generating:
            self.mode_switches.labels("batch").inc()
        elif n_generating == 1 < self.n_generating:
            self.mode_switches.labels("mtp").inc()
        self.n_generating = n_generating

    def begin(self, n_prompt: int, n_cached: int, n_running: int) -> None:
        """Count a request that begins: its prompt's tokens, the cached ones, and the requests that run now."""
        self.prompt_tokens.inc(n_prompt)
        self.cached_prompt_tokens.inc(n_cached)
        self.cache_hits.inc(n_cached > 0)
        self.in_flight.set(n_running)

    def finish(self, counts: DraftCounts, tokens_per_second: float | None, n_running: int) -> None:
        """Count a request that ends: its drafts, its speed if it has one, and the requests that still run."""
        self.in_flight.set(n_running)
        self._add_drafts(counts)
        if tokens_per_second is not None:
            self.rate.observe(tokens_per_second)

    def _add_drafts(self, counts: DraftCounts) -> None:
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
            gauge = Gauge(f"memory_{name}_bytes", text, namespace="mlx_mtp", registry=self.registry)
            gauge.set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _totals(counts: Sequence[DraftCounts]) -> tuple[int, int]:
    """(drafts, accepted drafts)"""
    return sum(c.n_drafted for c in counts), sum(c.n_accepted for c in counts)
