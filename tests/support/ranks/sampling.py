"""The joint distribution of the first tokens that ranks sample, against that of plain decoding of the whole model.

python -m tests.support.ranks.sampling tensor|pipeline FOLDER RUNS
"""

import sys

import mlx.core as mx

import mlx_mtp
from tests.support.distribution import BOTH, PENALTY, PLAIN, Case
from tests.support.launch import report

how, folder, runs = sys.argv[1:]
group = mx.distributed.init()


class OnRanks(Case):
    """Drawn by all ranks, expected of the whole model."""

    def model(self):
        return mlx_mtp.load(folder, settings=False)[0]

    def drafting_model(self, runs):
        return mlx_mtp.load(folder, settings=False, **{f"{how}_group": group})[0]


for case in (
    OnRanks(2, PLAIN),
    OnRanks(3, BOTH),
    OnRanks(2, PLAIN, copies=3),
    OnRanks(2, PLAIN, acceptance="coupled"),
    OnRanks(2, PLAIN, acceptance="match", penalties=PENALTY),
):
    report(str(case), case.p_value(int(runs)))
