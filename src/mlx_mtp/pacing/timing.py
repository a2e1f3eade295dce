"""The times of a model's steps, which are kept from one generation to the next."""

from typing import Any, cast

from ..layers.drafting import Settings
from ..models.protocol import MTPModel
from .batch_depth import BatchTimes
from .depth import MAX_DRAFT_TOKENS
from .step_times import StepTimes


class Timing:
    """
    Attributes:
        of_one (StepTimes): The times of steps of one sequence on this machine.
        of_batches (BatchTimes): The times of steps by batch size.
        turn (object): Identifies the generation that last submitted work to the device.

    Args:
        tuned (Settings): The settings of ``--tune``, whose times are the first ones.
    """

    def __init__(self, tuned: Settings):
        self.of_one = StepTimes(MAX_DRAFT_TOKENS, tuned.seconds)
        self.of_batches = BatchTimes(self.of_one)
        self.turn: Any = None


def timing_of(model: MTPModel) -> Timing:
    """The timing of a model, made on the first call and kept in ``model.drafting``."""
    drafting = model.drafting
    if drafting.timing is None:
        drafting.timing = Timing(drafting.tuned or Settings())
    return cast(Timing, drafting.timing)
