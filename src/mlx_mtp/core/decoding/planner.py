"""The choice of each step's draft length and source, and the times of steps."""

from collections import deque
from time import perf_counter

from ..models.mixin import MTPModel
from ..pacing.depth import MAX_DRAFT_TOKENS, Depth, Offer, expected_tokens
from ..pacing.step_times import FREE, HEAD, PLAIN_PLAN, Plan, times_of
from ..traces import n_traces
from .decoder import Decoder, draft_limits
from .exchange import Exchange
from .sequence import Sequence
from .window import Drafts, Step, WindowPlan

Planned = tuple[WindowPlan, int]  # the plan of a window, and the most drafts of any sequence that were made


class Planner:
    """Plans the drafts of each window by a ``Depth``, and passes it the time of each step. Ranks use rank 0's seconds.

    A step may also wait for a pass of another generation: ``model.drafting.turn`` is the one that last submitted work.
    """

    def __init__(self, model: MTPModel, given: Depth | None = None):
        self.depth = Depth(MAX_DRAFT_TOKENS, times=times_of(model)) if given is None else given.for_text()
        self.exchange, self.unsent = None, deque[float]()
        self.received = self.unsent  # one process uses its own seconds at once
        if model.ranks is not None:
            self.exchange = exchange = Exchange(model.ranks, self.depth.times)
            self.unsent, self.received = exchange.unsent, exchange.received
        # The steps whose seconds are not received yet: the plan, the mean number of accepted drafts, whether the seconds are of
        # the step only, whether no other generation ran since the step before, and the number and length of its sequences
        self.waiting: deque[tuple[Plan, float, bool, bool, int, int]] = deque()
        self.latest: list[Planned] = []  # of the latest windows
        # The sequences of the latest step, and the time and the number of traces at its end.
        self.last_end: tuple[list[Sequence], float, int] = [], 0.0, 0
        self.drafting, self.turn = model.drafting, object()
        self.drafting.turn = self.turn  # the prefill of this generation submits work first
        self.is_alone = True  # no other generation has submitted work since the latest step
        self.is_interrupted = True  # other work, such as prefill, took time since the latest step that was timed

    def next(self, decoder: Decoder) -> WindowPlan:
        sequences, n_tokens = decoder.sequences, max(decoder.cache.n_tokens)
        offers = [(s, s.offers(limit)) for s, limit in zip(sequences, draft_limits(decoder))]
        given = max((len(offer.get(HEAD, ())) for s, offer in offers if s.fixed(HEAD) is not None), default=0)
        plan, is_chosen = Plan(given), any(s.fixed(name) is None for s, offer in offers for name in offer)
        if is_chosen:
            plan = self.depth.next([offer for s, offer in offers if s.end is None], given, len(sequences), n_tokens)
        of_each = tuple(_own_plan(s, offer, plan, len(sequences) == 1) for s, offer in offers)
        width = max(own.k for own in of_each)
        uses_head = any(own.k > 0 and not own.skips_head for own in of_each)
        whole = Plan(width, HEAD if uses_head or width == 0 else FREE)
        return WindowPlan(sequences, of_each, whole, is_chosen and width <= plan.k, n_tokens)

    def start_window(self, plan: WindowPlan, drafts: Drafts) -> None:
        """Call after submitting a window to the device, before the caller can run another generation."""
        self._take_turn()
        self.latest = [*self.latest[-2:], (plan, len(drafts))]

    def _take_turn(self) -> None:
        self.is_alone = self.is_alone and self.drafting.turn is self.turn
        self.drafting.turn = self.turn

    def record(self, step: Step) -> None:
        """Call when the host knows the tokens of a step: those of a plain one while the device runs the next step."""
        now, made, (sequences, before, made_before) = perf_counter(), n_traces(), self.last_end
        has_trace = made > made_before  # a new shape was traced, and its kernels were compiled
        window = step.choice.window
        planned, drafts, n = window.plan, window.drafts, len(window.sequences)
        for s, own, n_accepted, count in zip(window.sequences, planned.of_each, step.n_accepted, step.counts):
            if s in sequences and not has_trace:
                s.counts.n_timed += count
                s.counts.seconds += now - before
            # Drafts dropped by ``p_min`` count as rejected: the head has computed them.
            if own.k > 0 and not own.skips_head:
                s.rates.count_window(own.k, n_accepted)
        self.last_end = window.sequences, now, made
        if not planned.is_chosen:
            self.is_interrupted = True
            return
        plan, is_plain = planned.whole, len(drafts) == 0
        windows = self.latest[-3:] if is_plain else self.latest[-2:]  # the window after a plain step has begun already
        self._take_turn()
        mean = sum(step.n_accepted) / n
        if not self.is_interrupted:
            is_clear = _is_clear(windows, is_plain) and not has_trace
            self.waiting.append((plan, mean, is_clear, self.is_alone, n, planned.n_tokens))
            self.unsent.append(now - before)
        elif n > 1 or len(self.latest) > 2:  # a first step also prefills
            self.depth.observe(plan, mean, None, n_sequences=n, n_tokens=planned.n_tokens)
        self.is_interrupted, self.is_alone = False, True
        while self.received:
            plan, mean, is_clear, is_alone, n, n_tokens = self.waiting.popleft()
            seconds = self.received.popleft()
            self.depth.observe(plan, mean, seconds if is_clear else None, is_alone, n, n_tokens)

    def clear(self) -> None:
        self.latest, self.last_end, self.is_interrupted = [], ([], 0.0, 0), True


def _is_clear(windows: list[Planned], is_plain: bool) -> bool:
    """Whether the time between the ends of two steps was spent only on the second, judged by the latest windows."""
    plans = [planned for planned, _ in windows]
    if any(planned.sequences != plans[-1].sequences for planned in plans):
        return False
    if is_plain:  # where plain and drafting steps alternate, the device may have run more or less than this pass
        return all(planned.whole == PLAIN_PLAN for planned in plans)
    # After a plain step, part of the time may belong to that step. After free drafts, the head has more inputs to catch up
    # with.
    return len(windows) == 2 and windows[0][1] > 0 and plans[0].whole.skips_head <= plans[1].whole.skips_head


def _own_plan(s: Sequence, offer: Offer, plan: Plan, is_alone: bool) -> Plan:
    """The plan of one sequence in a window, with the source that is expected to yield the most tokens."""
    best, max_tokens = PLAIN_PLAN, 0.0
    for name, rates in offer.items():
        fixed = s.fixed(name)
        k = min(plan.k if fixed is None else fixed, len(rates))
        if name != HEAD and fixed is not None:
            return Plan(k, name)
        # A single sequence drafts from the source that was chosen, and several from the head only if it is used at all.
        is_chosen = (name != HEAD) is plan.skips_head or not (is_alone or plan.skips_head)
        if is_chosen and k > 0 and (tokens := expected_tokens(rates[:k])[-1]) > max_tokens:
            best, max_tokens = Plan(k, name), tokens
    return best
