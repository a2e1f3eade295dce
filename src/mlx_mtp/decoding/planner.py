"""How many drafts each step makes, and from where; and what the steps take, for those that choose."""

from typing import cast

from ..models.protocol import MTPModel
from ..pacing.batch_depth import BatchDepth, BatchTimes
from ..pacing.depth import MAX_DRAFT_TOKENS, Depth, expected_tokens
from ..pacing.step_times import PLAIN_PLAN, Plan
from ..pacing.timing import timing_of
from .clock import Clock
from .decoder import Decoder, room_of
from .exchange import Exchange, Times
from .sequence import Sequence
from .window import Drafts, Step


class Planner:
    """Chooses what each sequence drafts: for one alone its own ``Depth``, for several a ``BatchDepth``.

    Args:
        model (MTPModel): Where several ranks run it, what chooses learns from rank 0's clock.
        times (Times, optional): What the steps of this generation feed. ``None`` where numbers of drafts are given.
    """

    def __init__(self, model: MTPModel, times: Times | None):
        self.model = model
        self.exchange = None if model.ranks is None else Exchange(model.ranks, times)
        self.clock: Clock[tuple[Depth, Plan, float]] = Clock(timing_of(model), self.exchange)
        self.of_many = BatchDepth(timing_of(model).of_batches)
        self.of_copies = BatchDepth(BatchTimes())  # where no head drafts: what steps then take is no one else's
        self.latest: list[Drafts] = []  # of the latest windows

    def next(self, decoder: Decoder) -> Drafts:
        """The next window's drafts, which are still to be made."""
        sequences, rooms = decoder.sequences, [room_of(decoder, b) for b in range(len(decoder))]
        if len(sequences) == 1:
            plan, depth = self._next_of_one(sequences[0], rooms[0])
            return Drafts(sequences, [plan], plan, depth)
        k, depth = self._shared(sequences, rooms)
        return Drafts(sequences, [_best_of_many(s, k, n)[0] for s, n in zip(sequences, rooms)], Plan(k), depth)

    def _next_of_one(self, s: Sequence, room: int) -> tuple[Plan, Depth | None]:
        offers, depth = s.offers(), depth_of(self.model, s)
        fixed = ((name, s.sources[name].fixed) for name in offers)
        plan = next((Plan(min(n, len(offers[name])), name) for name, n in fixed if n is not None), None)
        if plan is None and depth is not None:
            plan = depth.next(offers)
        if plan is None:
            plan = Plan(cast(int, s.options.num_draft_tokens))
        if plan.k > room:
            plan = Plan(room, plan.source) if room > 0 else PLAIN_PLAN
        return plan, depth

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
        assert decoder.drafts is not None
        self.clock.take_turn()
        self.latest = [*self.latest[-2:], decoder.drafts]

    def record_drafting(self, step: Step) -> None:
        """Call when a step's drafts have been accepted or rejected."""
        if len(step.drafts) > 0:
            self._record(step)

    def record_plain(self, step: Step) -> None:
        """Call when the tokens of a step without drafts are known, while the device runs the next."""
        if len(step.drafts) == 0:
            self._record(step)

    def _record(self, step: Step) -> None:
        drafts, is_plain, several = step.drafts, len(step.drafts) == 0, len(step.sequences) > 1
        beside = self.latest[-3:] if is_plain else self.latest[-2:]  # behind a plain one the next has begun
        depth, plan = drafts.depth, drafts.plan
        if several or depth is None:
            for s, own, n in zip(step.sequences, drafts.plans, step.n_accepted):
                if own.k > 0 and not own.skips_head:
                    s.rates.count_window(own.k, n)
        if depth is None or (several and len(drafts) > plan.k):
            self.clock.interrupt()  # no depth learns from a number that was given, or from a sequence's own
            return
        if several:
            plan, n_accepted = Plan(len(drafts)), sum(step.n_accepted) / len(step.sequences)
        else:
            # Drafts that the head was too unsure of count as rejected: they were paid for.
            plan, n_accepted = drafts.plans[0] if plan.skips_head else plan, step.n_accepted[0]
        is_first = not self.clock.record((depth, plan, n_accepted), _is_clear(beside, is_plain))
        if is_first and (several or len(self.latest) > 2):
            depth.observe(plan, n_accepted, None, True)
        for (depth, plan, n_accepted), seconds, is_alone in self.clock.known():
            depth.observe(plan, n_accepted, seconds, is_alone)

    def clear(self) -> None:
        """Let go of all sequences."""
        self.latest = []
        self.clock.interrupt()

    def interrupt(self) -> None:
        """Something else than steps took time."""
        self.clock.interrupt()


def _is_clear(beside: list[Drafts], is_plain: bool) -> bool:
    """Whether the time between two steps is that of the second, as far as the windows beside it tell."""
    last = beside[-1]
    if any(d.sequences != last.sequences or len(d) > d.plan.k for d in beside):
        return False
    if is_plain:  # where steps change from plain to drafting or back, more or less than this pass may be behind it
        return all(d.plan == PLAIN_PLAN for d in beside)
    # Behind a step without drafts, part of the time may be that step's. And behind free drafts the head has more rows to make.
    return len(beside) == 2 and len(beside[0]) > 0 and beside[0].plan.skips_head <= last.plan.skips_head


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
        s.depth = Depth(MAX_DRAFT_TOKENS, times=timing_of(model).of_one, only=only, rates=s.rates)
    return s.depth
