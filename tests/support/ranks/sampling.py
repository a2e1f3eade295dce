"""The joint distribution of the first tokens that ranks sample, against that of plain decoding of the whole model.

python -m tests.support.ranks.sampling tensor|pipeline FOLDER RUNS
"""

import sys

import mlx.core as mx

import mlx_mtp
from tests.support.distribution import Case
from tests.support.launch import report

how, folder, runs = sys.argv[1:]
group = mx.distributed.init()


class OnRanks(Case):
    """Drawn by all ranks, expected of the whole model."""

    def model(self):
        return mlx_mtp.load(folder, settings=False)[0]

    def drafting_model(self):
        return mlx_mtp.load(folder, settings=False, **{f"{how}_group": group})[0]


for case in (
    OnRanks(2, temp=1.0),
    OnRanks(3, temp=0.7, top_p=0.9, xtc_probability=0.5),
    OnRanks(2, copies=3, temp=1.0),
    OnRanks(2, acceptance="coupled", temp=1.0),
    OnRanks(2, acceptance="match", temp=1.0, penalties={"repetition_penalty": 1.5}),
):
    report(case.name, case.p_value(int(runs)))
