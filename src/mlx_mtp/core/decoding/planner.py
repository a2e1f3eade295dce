"""The choice of each step's draft length and source, and the times of steps."""

from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

from ..models.mixin import MTPModel
from ..pacing import MAX_DRAFT_TOKENS
from ..pacing.depth import Depth, Offer, expected_tokens
from ..pacing.step_times import FREE, HEAD, PLAIN_PLAN, Plan
from ..traces import n_traces
from .decoder import Decoder, draft_limits
from .exchange import Exchange
from .sequence import TextSequence
from .window import Drafts, Step, WindowPlan


class Submitted(NamedTuple):
    """A window that was submitted to the device."""

    plan: WindowPlan
    n_drafts: int  # the most that were made for a sequence


class End(NamedTuple):
    """The end of a step."""

    sequences: list[TextSequence]
    time: float  # the clock, in seconds
    n_traces: int  # the number of traces that the thread has made


class Observation(NamedTuple):
    """A step as its ``Depth`` observes it, once rank 0's seconds are known."""

    plan: Plan
    n_accepted: float  # the mean of the sequences
    is_clear: bool  # whether the seconds are of this step only
    is_alone: bool  # whether no other generation ran since the step before
    n_sequences: int
    n_tokens: int  # the tokens of the longest sequence


class Planner:
    """Plans the drafts of each window by a ``Depth``, and passes it the time of each step. Ranks use rank 0's seconds.

    A step may also wait for a pass of another generation: ``Pace.turn`` is the one that last submitted work.
    """

    def __init__(self, model: MTPModel, given: Depth | None = None):
        self.depth = Depth(MAX_DRAFT_TOKENS, times=model.pace.times) if given is None else given.for_text()
        self.exchange = None if model.ranks is None else Exchange(model.ranks, self.depth.times)
        self.latest: deque[Submitted] = deque(maxlen=3)
        self.pace = model.pace
        self.pace.turn = self.turn = object()  # the prefill of this generation submits work first
        self.is_alone = True  # no other generation has submitted work since the latest step
        self.clear()

    def clear(self) -> None:
        self.latest.clear()
        self.last_end = End([], 0.0, 0)
        self.is_interrupted = True  # other work, such as prefill, took time since the latest step that was observed

    def next(self, decoder: Decoder) -> WindowPlan:
        sequences = decoder.sequences
        n_tokens = max(decoder.cache.n_tokens)
        offers = [(s, s.drafting.offers(limit, s.n_unobserved)) for s, limit in zip(sequences, draft_limits(decoder))]
        n_given = max(
            (len(offer.get(HEAD, ())) for s, offer in offers if s.drafting.fixed(HEAD) is not None), default=0
        )
        chosen = Plan(n_given)
        is_chosen = any(s.drafting.fixed(name) is None for s, offer in offers for name in offer)
        if is_chosen:
            running = [offer for s, offer in offers if s.end is None]
            chosen = self.depth.next(running, n_given, len(sequences), n_tokens)
        of_each = tuple(_own_plan(s, offer, chosen, len(sequences) == 1) for s, offer in offers)
        width = max(each.k for each in of_each)
        uses_head = any(each.k > 0 and not each.skips_head for each in of_each)
        whole = Plan(width, HEAD if uses_head or width == 0 else FREE)
        return WindowPlan(sequences, of_each, whole, is_chosen and width <= chosen.k, n_tokens)

    def start_window(self, plan: WindowPlan, drafts: Drafts) -> None:
        """Call after submitting a window to the device, before the caller can run another generation."""
        self._take_turn()
        self.latest.append(Submitted(plan, len(drafts)))

    def _take_turn(self) -> None:
        self.is_alone = self.is_alone and self.pace.turn is self.turn
        self.pace.turn = self.turn

    def record(self, step: Step) -> None:
        """Call when the host knows the tokens of a step: those of a plain one while the device runs the next step."""
        plan = step.choice.window.plan
        n = len(plan.sequences)
        before = self.last_end
        self.last_end = End(plan.sequences, perf_counter(), n_traces())
        seconds = self.last_end.time - before.time
        has_trace = self.last_end.n_traces > before.n_traces  # A new shape was traced, and its kernels were compiled.
        for s, each, n_accepted, count in zip(plan.sequences, plan.of_each, step.n_accepted, step.counts):
            if s in before.sequences and not has_trace:
                s.drafting.counts.n_timed += count
                s.drafting.counts.seconds += seconds
            # Drafts dropped by ``p_min`` count as rejected: the head has computed them.
            if each.k > 0 and not each.skips_head:
                s.drafting.rates.count_window(each.k, n_accepted)
        if not plan.is_chosen:
            self.is_interrupted = True
            return
        self._take_turn()
        is_clear = (
            not self.is_interrupted
            and not has_trace
            and _is_clear(self.latest, is_plain=len(step.choice.window.drafts) == 0)
        )
        if not self.is_interrupted or n > 1 or len(self.latest) > 2:  # the first step of a text alone also prefills
            observation = Observation(plan.whole, sum(step.n_accepted) / n, is_clear, self.is_alone, n, plan.n_tokens)
            known = [(observation, seconds)] if self.exchange is None else self.exchange.swap(observation, seconds)
            for seen, time in known:
                observed = time if seen.is_clear else None
                self.depth.observe(seen.plan, seen.n_accepted, observed, seen.is_alone, seen.n_sequences, seen.n_tokens)
        self.is_interrupted = False
        self.is_alone = True


def _is_clear(latest: Iterable[Submitted], is_plain: bool) -> bool:
    """Whether the time between the ends of two steps was spent on the second alone, judged by the latest windows.

    The time of a plain step is its own if the windows before and after it are plain, too: otherwise the device may have run
    more or less than its pass. The time of a step with drafts is its own if the window before had drafts, which were free only
    if its own are: otherwise part of the time may belong to a plain step, or the head has more inputs to catch up with.
    """
    windows = [*latest] if is_plain else [*latest][-2:]  # the window after a plain step has begun already
    plans = [window.plan for window in windows]
    if any(plan.sequences != plans[-1].sequences for plan in plans):
        return False
    if is_plain:
        return all(plan.whole == PLAIN_PLAN for plan in plans)
    return len(plans) == 2 and windows[0].n_drafts > 0 and plans[0].whole.skips_head <= plans[1].whole.skips_head


def _own_plan(s: TextSequence, offer: Offer, chosen: Plan, is_alone: bool) -> Plan:
    """The plan of one sequence in a window, with the source that is expected to yield the most tokens."""
    best, max_tokens = PLAIN_PLAN, 0.0
    for name, rates in offer.items():
        fixed = s.drafting.fixed(name)
        k = min(chosen.k if fixed is None else fixed, len(rates))
        if name != HEAD and fixed is not None:
            return Plan(k, name)
        # A single sequence drafts from the source that was chosen, and several from the head only if it is used at all.
        may_draft = (name != HEAD) is chosen.skips_head or not (is_alone or chosen.skips_head)
        if may_draft and k > 0 and (tokens := expected_tokens(rates[:k])[-1]) > max_tokens:
            best, max_tokens = Plan(k, name), tokens
    return best
