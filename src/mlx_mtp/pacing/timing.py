"""What a model's steps take: kept from one generation to the next."""

from typing import Any, cast

from ..layers.drafting import Settings
from ..models.protocol import MTPModel
from .batch_depth import BatchTimes
from .depth import MAX_DRAFT_TOKENS
from .step_times import StepTimes


class Timing:
    """
    Attributes:
        of_one (StepTimes): What steps of one sequence take on this machine.
        of_batches (BatchTimes): What those of several take.
        turn (object): Of the generation that gave the device work last.

    Args:
        tuned (Settings): What ``--tune`` has measured, to begin with.
    """

    def __init__(self, tuned: Settings):
        self.of_one = StepTimes(MAX_DRAFT_TOKENS, tuned.seconds)
        self.of_batches = BatchTimes(self.of_one)
        self.turn: Any = None


def timing_of(model: MTPModel) -> Timing:
    """A model's, made when it is first asked for. It is kept beside the model's settings, and so lives as long as the model."""
    drafting = model.drafting
    if drafting.timing is None:
        drafting.timing = Timing(drafting.tuned or Settings())
    return cast(Timing, drafting.timing)
