"""Write the demo with ternary weights in a rotated basis, as Bonsai 2 has them, beside the head that was trained for its own.

    python -m benchmarks.ternary --mlx-path ternary
    mlx_mtp fit --model ternary --corpus FILES --mlx-path ternary-fitted

The demo's weights are rounded to -s, 0 and s in groups of 128 inputs, which are rotated behind random signs. Rounded alone they
are a poor language model, so they are then trained, rounded, to say what the demo says of Python's standard library. The result
is a dense checkpoint of these weights, rotated back, in float32: layers of the demo have 128 inputs, mlx-lm's packs rotate 512
at least, and MLX's CPU backend multiplies packed weights slowly.
"""

import argparse
import shutil
import sysconfig
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

import mlx_mtp
from mlx_mtp.checkpoint.originals.head import measure_acceptance
from tests.support.packs import GATES, GROUP, rotated, ternary

BATCH, LENGTH = 8, 64  # texts of a step, and tokens of a text


def is_packed(name: str, w: mx.array) -> bool:
    return w.ndim == 2 and not name.removesuffix(".weight").endswith(GATES)


def rounded(w: mx.array, signs: mx.array) -> mx.array:
    """Weights [n, H] -> the nearest that are ternary in the rotated basis; gradients pass as if they were not rounded."""
    turned = rotated(w * signs, GROUP)
    codes, scales = ternary(turned.reshape(len(w), -1, GROUP))
    near = rotated((codes * scales).reshape(w.shape), GROUP) * signs
    return w + mx.stop_gradient(near - w)


def read_texts(tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Pieces of the standard library, to train on and to measure: one file in ten, of which neither sees the other's."""
    parts: tuple[list[list[int]], list[list[int]]] = ([], [])
    for i, file in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        tokens = tokenizer.encode(file.read_text(encoding="utf-8", errors="replace")[:40_000])
        pieces = [tokens[j : j + LENGTH + 1] for j in range(0, len(tokens) - LENGTH, LENGTH)]
        parts[i % 10 == 0].extend(pieces)
    return parts


def nats(model, texts: list[list[int]]) -> float:
    """The mean of a token."""
    tokens = mx.array(texts)
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean().item()


def say(model, tokenizer, texts, what: str) -> None:
    model.eval()
    print(
        f"{what}: {nats(model, texts):.3f} nats a token, {measure_acceptance(model, tokenizer):.3f} of first drafts",
        flush=True,
    )


def train(model, teacher, texts: list[list[int]], iters: int, learning_rate: float) -> None:
    """Train a model's weights, rounded, to say what the teacher says; it is left with them rounded."""
    backbone = {n: w for n, w in tree_flatten(model.parameters()) if not n.startswith(model.head_prefix)}
    keys = mx.random.split(mx.random.key(0), len(backbone))
    signs = {
        name: 1.0 - 2.0 * mx.random.bernoulli(shape=w.shape[1:], key=key)
        for (name, w), key in zip(backbone.items(), keys)
        if is_packed(name, w)
    }

    def update(weights: dict[str, mx.array]) -> None:
        model.update(tree_unflatten([(n, rounded(w, signs[n]) if n in signs else w) for n, w in weights.items()]))

    def divergence(weights: dict[str, mx.array], tokens: mx.array, target: mx.array) -> mx.array:
        update(weights)
        return nn.losses.kl_div_loss(nn.log_softmax(model(tokens)), target).mean()

    schedule = optim.join_schedules(
        [optim.linear_schedule(0, learning_rate, 10), optim.cosine_decay(learning_rate, max(iters - 10, 1))], [10]
    )
    optimizer, step, order = optim.Adam(schedule), mx.value_and_grad(divergence), mx.random.key(1)
    for i in tqdm(range(iters), unit="step", disable=None):
        order, key = mx.random.split(order)
        chosen = mx.random.randint(0, len(texts), (BATCH,), key=key).tolist()
        tokens = mx.array([texts[j][:-1] for j in chosen])
        loss, gradient = step(backbone, tokens, nn.log_softmax(teacher(tokens)))
        backbone = optimizer.apply_gradients(gradient, backbone)
        mx.eval(loss, backbone, optimizer.state)
        if i % 20 == 0:
            print(f"step {i}: {loss.item():.3f} nats from the demo", flush=True)
    update(backbone)
    mx.eval(model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo with ternary weights, beside the head of its own.")
    parser.add_argument("--mlx-path", type=Path, required=True)
    parser.add_argument("--iters", type=int, default=200, help="Steps of training (default: 200).")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    teacher, tokenizer = mlx_mtp.load(str(mlx_mtp.DEMO))
    model, _ = mlx_mtp.load(str(mlx_mtp.DEMO))
    for m in (teacher, model):
        m.set_dtype(mx.float32)
    texts, measured = read_texts(tokenizer)
    measured = measured[:: len(measured) // 32]
    say(teacher, tokenizer, measured, "the demo")
    train(model, teacher, texts, 0, args.learning_rate)
    say(model, tokenizer, measured, "rounded")
    model.update(teacher.parameters())
    train(model, teacher, texts, args.iters, args.learning_rate)
    say(model, tokenizer, measured, f"trained for {args.iters} steps")
    shutil.copytree(mlx_mtp.DEMO, args.mlx_path)
    mx.save_safetensors(
        str(args.mlx_path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )


if __name__ == "__main__":
    main()
