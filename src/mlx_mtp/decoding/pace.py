"""How many drafts each step makes, and from where; and what the steps take, for those that choose."""

from collections.abc import Sequence as ListOf
from typing import NamedTuple, cast

from ..models.drafting import Settings
from ..models.protocol import MTPModel
from .clock import Clock
from .decoder import Decoder
from .depth import MAX_DRAFT_TOKENS, Depth, expected_tokens
from .exchange import Exchange, Times
from .sequence import Sequence
from .size_depth import BatchDepth, SizeTimes
from .step_times import PLAIN_PLAN, Plan, StepTimes
from .window import Step


class Asked(NamedTuple):
    """What was asked of a window."""

    sequences: list[Sequence]
    plan: Plan  # of one sequence, or the drafts of several
    depth: Depth | None  # who chose it; ``None`` for a given number
    n_drafts: int  # that the window has: the head may have been unsure of some, or a sequence has more of its own


class Pace:
    """Chooses what each sequence drafts: for one alone its own ``Depth``, for several a ``BatchDepth``.

    Args:
        model (MTPModel): Where several ranks run it, what chooses learns from rank 0's clock.
        times (Times, optional): What the steps of this generation feed. ``None`` where numbers of drafts are given.
    """

    def __init__(self, model: MTPModel, times: Times | None):
        self.model = model
        self.exchange = None if model.ranks is None else Exchange(model.ranks, times)
        self.clock: Clock[tuple[Depth, Plan, float]] = Clock(model.drafting, self.exchange)
        self.of_many = BatchDepth(size_times(model))
        self.of_copies = BatchDepth(SizeTimes())  # where no head drafts: what steps then take is no one else's
        self.asked: list[Asked] = []  # of the latest windows
        self.planned: tuple[Plan, Depth | None] | None = None  # of the next window

    def next(self, decoder: Decoder) -> list[Plan]:
        """What each sequence drafts."""
        sequences, rooms = decoder.sequences, decoder.rooms
        if len(sequences) == 1:
            return [self._next_of_one(sequences[0], rooms[0])]
        return self._next_of_many(sequences, rooms)

    def _next_of_one(self, s: Sequence, room: int) -> Plan:
        offers, depth = s.offers(), depth_of(self.model, s)
        fixed = ((name, s.sources[name].fixed) for name in offers)
        plan = next((Plan(min(n, len(offers[name])), name) for name, n in fixed if n is not None), None)
        if plan is None and depth is not None:
            plan = depth.next(offers)
        if plan is None:
            plan = Plan(cast(int, s.options.num_draft_tokens))
        if plan.k > room:
            plan = Plan(room, plan.source) if room > 0 else PLAIN_PLAN
        self.planned = plan, depth
        return plan

    def _next_of_many(self, sequences: list[Sequence], rooms: list[int]) -> list[Plan]:
        k, depth = self._shared(sequences, rooms)
        self.planned = Plan(k), depth
        return [_best_of_many(s, k, room)[0] for s, room in zip(sequences, rooms)]

    def _shared(self, sequences: list[Sequence], rooms: list[int]) -> tuple[int, Depth | None]:
        """The drafts of each sequence that has no number of its own, and who chose them."""
        # The rooms of those with a number, of those without, and of those who copy as many as these draft.
        given, auto, follow = [0], [0], [0]
        for s, room in zip(sequences, rooms):
            if isinstance(s.options.num_draft_tokens, int):
                given.append(min(s.options.num_draft_tokens, room))
            else:
                auto.append(room)
            if room > 0 and any(s.sources[name].fixed is None for name in s.offers()):
                follow.append(room)
        most = min(max(auto + follow), MAX_DRAFT_TOKENS)
        if most == 0 or (max(auto) == 0 and max(given) > 0):
            return max(given), None
        depths = self.of_many if any(s.options.num_draft_tokens != 0 for s in sequences) else self.of_copies
        k = depths.next(len(sequences), [_rates(s) for s in sequences if s.end is None])
        return max(min(k, most), *given), depths.of(len(sequences))  # a window is as wide as the widest

    def start_window(self, decoder: Decoder) -> None:
        """Call when the device was given a window, before the caller can turn to another generation."""
        assert decoder.window is not None
        self.clock.take_turn()
        if self.planned is None:  # nobody was asked for a window of one prompt's last token
            self.planned = PLAIN_PLAN, depth_of(self.model, decoder.sequences[0])
        self.asked = [*self.asked[-2:], Asked(decoder.sequences, *self.planned, decoder.window.n_drafts)]
        self.planned = None

    def record_drafting(self, step: Step) -> None:
        """Call when a step's drafts have been accepted or rejected."""
        if step.window.n_drafts > 0:
            self._record(step)

    def record_plain(self, step: Step) -> None:
        """Call when the tokens of a step without drafts are known, while the device runs the next."""
        if step.window.n_drafts == 0:
            self._record(step)

    def _record(self, step: Step) -> None:
        is_plain, several = step.window.n_drafts == 0, len(step.sequences) > 1
        beside = self.asked[-3:] if is_plain else self.asked[-2:]
        asked = beside[-2] if is_plain else beside[-1]
        depth, plan = asked.depth, asked.plan
        if several or depth is None:
            for s, own, n in zip(step.sequences, step.window.plans, step.n_accepted):
                if own.k > 0 and not own.is_free:
                    s.rates.count_window(own.k, n)
        is_wider = several and asked.n_drafts > plan.k
        if depth is None or is_wider:
            self.clock.interrupt()  # who chooses has no such windows
            return
        # Drafts that the head was too unsure of count as rejected: they were paid for.
        n_accepted = sum(step.n_accepted) / len(step.sequences) if several else step.n_accepted[0]
        plan = Plan(step.window.n_drafts) if several else plan
        is_first = not self.clock.record((depth, plan, n_accepted), _is_clear(beside, is_plain))
        if is_first and (several or len(self.asked) > 2):
            depth.observe(plan, n_accepted, None, True)
        for (depth, plan, n_accepted), seconds, is_alone in self.clock.known():
            depth.observe(plan, n_accepted, seconds, is_alone)

    def clear(self) -> None:
        """Let go of all sequences."""
        self.asked = []
        self.clock.interrupt()

    def interrupt(self) -> None:
        """Something else than steps took time."""
        self.clock.interrupt()


def _is_clear(beside: ListOf[Asked], is_plain: bool) -> bool:
    """Whether the time between two steps is that of the second, as far as the windows beside it tell."""
    last = beside[-1]
    if any(a.sequences != last.sequences or a.n_drafts > a.plan.k for a in beside):
        return False
    if is_plain:  # where steps change from plain to drafting or back, more or less than this pass may be behind it
        return all(a.plan == PLAIN_PLAN for a in beside)
    # Behind a step without drafts, part of the time may be that step's. And behind free drafts the head has more rows to make.
    return len(beside) == 2 and beside[0].n_drafts > 0 and beside[0].plan.is_free <= last.plan.is_free


def _best_of_many(s: Sequence, k: int, room: int) -> tuple[Plan, list[float]]:
    """What one of several sequences drafts where they share k, and the acceptance rates of its source.

    That is the source that is expected to yield the most tokens.
    """
    n = s.options.num_draft_tokens
    best, rates = Plan(min(n if isinstance(n, int) else k, room)), s.rates.estimate
    tokens = expected_tokens(rates)[best.k]
    for name, offered in s.offers().items():
        fixed = s.sources[name].fixed
        n_free = min(k if fixed is None else fixed, room, len(offered))
        if n_free > 0 and (more := expected_tokens(offered)[n_free]) > tokens:
            best, rates, tokens = Plan(n_free, name), offered, more
    return best, rates


def _rates(s: Sequence) -> list[float]:
    """The acceptance rates of a sequence's best source, [MAX_DRAFT_TOKENS], 0 where it may not draft as many."""
    plan, rates = _best_of_many(s, MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS)
    return [rates[i] if i < plan.k else 0.0 for i in range(MAX_DRAFT_TOKENS)]


def depth_of(model: MTPModel, s: Sequence) -> Depth | None:
    """What chooses for a sequence while it is alone, with the times that the model keeps; ``None`` for given numbers."""
    number = s.options.num_draft_tokens
    if s.depth is None and (number == "auto" or s.options.copy_drafts == "auto"):
        only = number if isinstance(number, int) else None
        s.depth = Depth(MAX_DRAFT_TOKENS, times=step_times(model), only=only, rates=s.rates)
    return s.depth


def step_times(model: MTPModel) -> StepTimes:
    """What steps of one sequence take. A model keeps that from one generation to the next, and begins with its settings."""
    tuned = model.drafting.tuned or Settings()
    model.drafting.times = model.drafting.times or StepTimes(MAX_DRAFT_TOKENS, tuned.seconds)
    return cast(StepTimes, model.drafting.times)


def size_times(model: MTPModel) -> SizeTimes:
    """What steps take by the number of sequences, kept likewise."""
    model.drafting.batch_times = model.drafting.batch_times or SizeTimes(step_times(model))
    return cast(SizeTimes, model.drafting.batch_times)
