"""``mlx_mtp.server``, in which a request with a temperature of 1.25 fails as mlx-lm's compiled samplers can."""

from functools import partial

import mlx.core as mx

from mlx_mtp.server import __main__
from mlx_mtp.server.engine import ResponseGenerator

make_sampler = ResponseGenerator._make_sampler


@partial(mx.compile, inputs=mx.random.state, outputs=mx.random.state)
def fail(logprobs):
    mx.random.categorical(logprobs)
    raise ValueError("This sampler fails.")


ResponseGenerator._make_sampler = lambda self, args: (
    fail if args.sampling.temperature == 1.25 else make_sampler(self, args)
)

if __name__ == "__main__":
    __main__.main()
