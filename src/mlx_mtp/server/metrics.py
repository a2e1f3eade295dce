"""What a server counts, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..decoding.pace import DraftCounts

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)


class Metrics:
    """Every metric's name begins with ``mlx_mtp_``."""

    def __init__(self):
        self.registry = CollectorRegistry()  # one for each server, not the process's

        def make(kind, name, text, *args, **kwargs):
            return kind(name, text, *args, namespace="mlx_mtp", registry=self.registry, **kwargs)

        self.requests = make(Counter, "requests", "Requests answered, by HTTP status.", ["status"])
        self.in_flight = make(Gauge, "requests_in_flight", "Requests that are being generated.")
        self.queue_length = make(Gauge, "queue_length", "Requests that wait to be.")
        self.prompt_tokens = make(Counter, "prompt_tokens", "Tokens of prompts.")
        self.cached_prompt_tokens = make(Counter, "cached_prompt_tokens", "Of these, found in the prompt cache.")
        self.cache_hits = make(Counter, "prompt_cache_hits", "Prompts of which some was found in the prompt cache.")
        self.generated_tokens = make(Counter, "generated_tokens", "Tokens generated.")
        self.drafted_tokens = make(Counter, "drafted_tokens", "Drafts, by position in the window.", ["position"])
        self.accepted_tokens = make(Counter, "accepted_tokens", "Drafts that stood, by position.", ["position"])
        self.depth = make(Gauge, "depth", "Drafts in the latest step; 0 in a batch.")
        self.mode_switches = make(Counter, "mode_switches", "Changes over while a request was generated.", ["to"])
        self.first_token = make(
            Histogram, "time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=SECONDS
        )
        self.rate = make(
            Histogram, "tokens_per_second", "Of a request, after its first token, while it lasted.", buckets=RATES
        )

    def add_drafts(self, counts: DraftCounts) -> None:
        for position, (drafted, accepted) in enumerate(zip(counts.drafted, counts.accepted), 1):
            self.drafted_tokens.labels(position).inc(drafted)
            self.accepted_tokens.labels(position).inc(accepted)

    def watch_queue(self, length: Callable[[], int]) -> None:
        self.queue_length.set_function(length)

    def text(self) -> bytes:
        return generate_latest(self.registry)
