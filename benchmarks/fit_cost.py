"""What fitting a head costs: time, memory and disk for 1,000 tokens at the shapes of published models.

    python -m benchmarks.fit_cost --shapes 4b-4bit 27b-4bit

The head, the embedding and the output layer of a shape are made with random weights, and steps of training are timed on random
tokens. The backbone, which each token goes through once, is not made: its share is given as operations.
"""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from benchmarks.timing import seconds
from mlx_mtp.benchmark.synthetic import SHAPES
from mlx_mtp.fit.loss import DraftLoss
from mlx_mtp.fit.recording import TOP_K, bytes_per_token
from mlx_mtp.fit.training import make_trainable
from mlx_mtp.models import model_module
from scripts.shared import script_parser


def model_of(shape):
    """A model of a shape, of which only the parts that are used are ever computed."""
    module = model_module(shape["model_type"])
    return module.Model(module.ModelArgs.from_dict({"model_type": shape["model_type"], "text_config": dict(shape)}))


def make_head(shape):
    """A model of which the head, the embedding and the output layer are used."""
    model = model_of(shape)
    model.freeze()
    for layer in {id(x): x for x in (model.model.embed_tokens, model.output_layer)}.values():
        layer.weight = layer.weight.astype(mx.bfloat16)
    if "quantization" in shape:
        nn.quantize(
            model, **shape["quantization"], class_predicate=lambda p, _: p.endswith(("embed_tokens", "lm_head"))
        )
    make_trainable(model.mtp, None, 0)
    return model


def time_step(model, batch_size, length, n_drafts, repeat):
    """The least time of a step of training, in seconds."""
    V, H = model.output_layer.weight.shape[0], model.mtp.norm.weight.shape[0]
    tokens = mx.random.randint(0, V, (batch_size, length))
    hidden = mx.random.normal((batch_size, length, H)).astype(mx.bfloat16)
    ids = mx.random.randint(0, V, (batch_size, length, TOP_K))
    probabilities = mx.full(ids.shape, 1 / TOP_K, mx.float16)
    spans = mx.array([[0, length]] * batch_size)
    optimizer = optim.AdamW(1e-5)
    step = nn.value_and_grad(model.mtp, DraftLoss(model.model.embed_tokens, model.output_layer, n_drafts))

    def run():
        (loss, _), gradient = step(model.mtp, tokens, hidden, ids, probabilities, spans)
        optimizer.update(model.mtp, gradient)
        mx.eval(loss, model.mtp.parameters(), optimizer.state)

    return min(seconds(run) for _ in range(repeat))


def operations(model, n_drafts):
    """Those of a token's matrix products in training, forward and backward; of the output layer also once more."""
    head = sum(w.size for _, w in tree_flatten(model.mtp.trainable_parameters()) if w.ndim == 2)
    output = model.output_layer.weight.shape[0] * model.mtp.norm.weight.shape[0]
    return n_drafts * (6 * head + 6 * output)


def report(name, args):
    mx.clear_cache()
    mx.reset_peak_memory()
    model = make_head(SHAPES[name])
    n_parameters = sum(w.size for _, w in tree_flatten(model.mtp.trainable_parameters()))
    cost = f"{n_parameters / 1e6:.0f}M parameters trained, {16 * n_parameters / 1e9:.1f} GB with gradients and AdamW"
    n_bytes, n_operations = bytes_per_token(model) / 1e3, operations(model, args.drafts) / 1e9
    print(f"{name}: {cost}; for 1,000 tokens {n_bytes:.1f} MB on disk, {n_operations:.1f} TFLOP")
    if args.repeat > 0:
        mx.eval(model.mtp.parameters(), model.model.embed_tokens.parameters(), model.output_layer.parameters())
        seconds = time_step(model, args.batch_size, args.length, args.drafts, args.repeat)
        n_tokens = args.batch_size * args.length
        print(f"{1000 * seconds / n_tokens:.2f} s for 1,000 tokens, peak memory {mx.get_peak_memory() / 1e9:.1f} GB")


def main():
    flags = dict(batch_size=1, length=(32, "Tokens of a text."), drafts=4)
    parser = script_parser(__doc__, repeat=(2, "Steps to time; 0 computes the sizes alone."), **flags)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.8b-bf16", "4b-4bit"])
    args = parser.parse_args()
    for name in args.shapes:
        report(name, args)


if __name__ == "__main__":
    main()
