"""Sums without end, of two ranks of which rank 1 is lost: for tests/test_watch.py, run by mlx.launch.

python -m tests.support.ranks.collective kill|stop|fail
"""

import os
import signal
import sys

from tests.support.ranks import bare  # noqa: F401

# isort: split

import mlx.core as mx

from mlx_mtp.distributed.ranks import Ranks
from mlx_mtp.distributed.watch import watch

group = mx.distributed.init(strict=True, backend="ring")
with watch(Ranks(group)):
    for i in range(1_000_000):
        mx.eval(mx.distributed.all_sum(mx.ones(8), group=group))
        if i == 50 and group.rank() == 0:
            print("sums", flush=True)
        if i == 100 and group.rank() == 1:
            if sys.argv[1] == "fail":
                mx.async_eval(mx.distributed.all_sum(mx.ones(8), group=group))  # pending
                raise ValueError("of rank 1")
            else:
                os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "kill" else signal.SIGSTOP)
print("whole")
