"""``mlx_mtp.server``, in which a request with a temperature of 1.25 fails as mlx-lm's compiled samplers can.

With a temperature of 1.125 each rank draws a token of its own.
"""

from functools import partial

import mlx.core as mx

from mlx_mtp.server import __main__
from mlx_mtp.server.engine import ResponseGenerator

make_sampler = ResponseGenerator._make_sampler


@partial(mx.compile, inputs=mx.random.state, outputs=mx.random.state)
def fail(logprobs):
    mx.random.categorical(logprobs)
    raise ValueError("This sampler fails.")


def choose(self, args):
    samplers = {1.25: fail, 1.125: lambda logprobs: mx.array([1 + mx.distributed.init().rank()])}
    return samplers.get(args.sampling.temperature) or make_sampler(self, args)


ResponseGenerator._make_sampler = choose

if __name__ == "__main__":
    __main__.main()
