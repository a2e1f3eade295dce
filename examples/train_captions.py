"""Train a vision encoder for the demo checkpoint, so that it names what small pictures show.

    pip install '.[dev]' pillow
    python examples/train_captions.py --output captions

The pictures are drawn as the training goes (``demo_pictures.py``). The language model and its MTP head are the bundled
demo's, of which only the full attention is trained, which has never seen positions in three axes. The tower learns rows
that, put before the beginning of a docstring, make the demo write the caption:

    <|vision_start|> rows of the picture <|vision_end|> \"\"\"A large red circle.\"\"\"

There are four stages, because a step through the language model costs several times one of the tower alone:

1. codes: for each symbol of a caption (a digit, a word, a coloured shape) at each place, a row that makes the demo write
   it; no picture is looked at, and the demo's attention learns to read them
2. tower: it learns to give a picture's codes
3. together: tower and attention learn from what the demo then writes, one or two pictures in a text
4. head: the demo's MTP head learns to guess what the demo writes of pictures, three drafts deep; it is kept in a file of its
   own, so that both heads can be tried

The image's special tokens are four of the bytes that UTF-8 never has: their embeddings exist, and no text produces them.
The result is the tensors that were trained, in bfloat16, and the files that differ from the demo's. The state of each
stage is kept in the output folder (``codes.pt``, ...): the same command resumes it.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_pictures import KINDS, SYMBOLS, draw_picture
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm
from train_demo import DEPTH, HEAD_WEIGHTS, Head
from transformers import DynamicCache, Qwen2VLImageProcessorPil, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_5 import modeling_qwen3_5

DEMO = Path(__file__).parents[1] / "src/mlx_mtp/demo"
PLACES = 8  # rows that have codes of their own; those after them are blank
TOWER = "model.visual."
QUOTES = '"""'
END = 0  # <|endoftext|>
# The bytes FC to FF as byte-level BPE writes them, and what takes their places.
SPECIAL = {"ü": "<|video_pad|>", "ý": "<|vision_start|>", "þ": "<|vision_end|>", "ÿ": "<|image_pad|>"}

VISION_CONFIG = {
    "model_type": "qwen3_5",  # as in the published checkpoints
    "depth": 3,
    "hidden_size": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 256,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
    "initializer_range": 0.02,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 256, "longest_edge": 16384},  # pixels, not edges
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_files(folder: Path) -> None:
    """The files that differ from the demo's: the two configs and the tokenizer's."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    ids = {token: vocab.pop(char) for char, token in SPECIAL.items()}
    vocab.update(ids)
    (plain,) = tokenizer["added_tokens"]
    tokenizer["added_tokens"] += [{**plain, "id": i, "content": token} for token, i in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2), encoding="utf-8")
    config = json.loads((DEMO / "config.json").read_text())
    config |= {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": VISION_CONFIG,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")


def make_model(folder: Path) -> Qwen3_5ForConditionalGeneration:
    """The demo with a new tower, in float32, frozen."""
    config = Qwen3_5Config.from_dict(json.loads((folder / "config.json").read_text()))
    config.text_config._attn_implementation = config.vision_config._attn_implementation = "sdpa"
    model = Qwen3_5ForConditionalGeneration(config)
    demo = {name: w for name, w in load_file(DEMO / "model.safetensors").items() if not name.startswith("mtp.")}
    missing, unknown = model.load_state_dict(demo, strict=False)
    if unknown or not all(name.startswith((TOWER, "lm_head.")) for name in missing):
        raise SystemExit(f"{DEMO} does not fit: {missing}, {unknown}")
    model.tie_weights()
    for name, p in model.model.visual.named_parameters():
        if p.ndim > 1:  # the library's initial weights are of 0.02, with which so small a tower learns slowly
            nn.init.normal_(p, std=0.5 if "pos_embed" in name else p[0].numel() ** -0.5)
    return model.float().requires_grad_(False)


def make_head(model) -> Head:
    """The head of the demo."""
    head = Head(model.config.text_config).float()
    weights = load_file(DEMO / "model.safetensors")
    head.load_state_dict({name[4:]: w.float() for name, w in weights.items() if name.startswith("mtp.")})
    return head


def trained_tensors(model) -> tuple[dict, dict]:
    """The parameters that are trained, by name: the tower's, and those of the demo's full attention."""
    tower, attention = {}, {}
    for name, p in model.named_parameters():
        if name.startswith(TOWER):
            tower[name] = p.requires_grad_(True)
        elif ".self_attn." in name and p.ndim == 2:
            attention[name] = p.requires_grad_(True)
    return tower, attention


def gated_delta_rule(query, key, value, g, beta, **kwargs):
    """The library's function for short texts: from no state, in one chunk, with nothing padded."""
    repeats = value.shape[2] // key.shape[2]
    q, k = (F.normalize(x.float(), dim=-1).repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (query, key))
    v, beta, g = (x.float().transpose(1, 2) for x in (value, beta, g))  # v [B, H, T, D], the others [B, H, T]
    total, T = g.cumsum(-1), g.shape[-1]
    later = torch.ones(T, T, dtype=torch.bool, device=g.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()  # [B, H, T, T]
    lower = (k * beta[..., None]) @ k.transpose(-1, -2) * decay.tril(-1)
    unit = torch.eye(T, device=g.device)
    v = torch.linalg.solve_triangular(lower + unit, v * beta[..., None], upper=False, unitriangular=True)
    out = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) * decay @ v
    return out.transpose(1, 2).to(query.dtype), None


class Captions:
    """Makes rows of pictures with their captions into texts that the demo reads."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.processor = Qwen2VLImageProcessorPil(**PROCESSOR)
        self.image = config["image_token_id"]
        self.start, self.end = config["vision_start_token_id"], config["vision_end_token_id"]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def prompt(self, grid) -> list[int]:
        """The ids before a caption; grid (1, rows, columns) in patches."""
        return [self.start, *[self.image] * n_rows(grid), self.end, *self.encode(QUOTES)]

    def process(self, pictures) -> dict:
        out = self.processor([p.image for p in pictures], return_tensors="pt")
        return dict(pixel_values=out["pixel_values"].float(), image_grid_thw=out["image_grid_thw"])

    def batch(self, rows: list[list]) -> tuple[dict, torch.Tensor]:
        """Rows of pictures -> the model's inputs, and the targets [B, T]: the captions and the end, -100 elsewhere."""
        images = self.process([p for row in rows for p in row])
        grid, ids, targets = iter(images["image_grid_thw"].tolist()), [], []
        for row in rows:
            x, y = [], []
            for picture in row:
                prompt = (self.encode("\n\n") if x else []) + self.prompt(next(grid))
                caption = self.encode(picture.caption + QUOTES)
                y += [-100] * (len(x) + len(prompt) - 1 - len(y)) + caption + [END]
                x += prompt + caption
            ids.append(x)
            targets.append(y)
        T = max(map(len, ids))
        ids = torch.tensor([x + [END] * (T - len(x)) for x in ids])
        targets = torch.tensor([y + [-100] * (T - len(y)) for y in targets])
        return {"input_ids": ids, "mm_token_type_ids": (ids == self.image).int(), **images}, targets


def n_rows(grid) -> int:
    """Of an image of (1, rows, columns) patches, in the language model."""
    return grid[1] * grid[2] // 4


def answers(model, inputs: dict, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the logits at the N positions that have a target [N, V], and their targets [N]."""
    with torch.autocast(targets.device.type, torch.bfloat16):
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
    chosen = targets != -100
    return F.linear(hidden[chosen].float(), model.lm_head.weight), targets[chosen]


def make_codes(model, captions: Captions) -> nn.Parameter:
    """[PLACES, symbols, H], around the embeddings of the symbols' own tokens."""
    table = model.get_input_embeddings().weight
    mean = torch.stack(
        [table[captions.encode(symbol if symbol.isdigit() else " " + symbol)].mean(0) for symbol in SYMBOLS]
    )
    mean = mean + 0.1 * torch.randn(mean.shape)
    return nn.Parameter(mean + 0.05 * torch.randn(PLACES, *mean.shape))


def symbols_of(pictures: list, grids) -> tuple[torch.Tensor, torch.Tensor]:
    """-> for each of the N rows of all pictures its place, and the index of its symbol."""
    places, symbols = [], []
    for picture, grid in zip(pictures, grids.tolist()):
        blank = ("",) * (n_rows(grid) - len(picture.symbols))
        symbols += [SYMBOLS.index(s) for s in picture.symbols + blank]
        places += [min(k, PLACES - 1) for k in range(n_rows(grid))]
    return torch.tensor(places), torch.tensor(symbols)


class Losses:
    """The loss of each stage for a step's number, which alone decides what is drawn: a resumed run sees the same."""

    def __init__(self, model, captions: Captions, codes: nn.Parameter, head: Head, seed: int):
        self.model, self.captions, self.codes, self.head, self.seed = model, captions, codes, head, seed

    def draw(self, stage: int, step: int, n: int, most: int = 1) -> list[list]:
        """n rows of one to ``most`` pictures."""
        rng = random.Random(f"{self.seed} {stage} {step}")
        return [[draw_picture(rng, False) for _ in range(rng.randint(1, most))] for _ in range(n)]

    def of_codes(self, step: int):
        return F.cross_entropy(*answers(self.model, *self.with_codes(self.draw(1, step, 24))))

    def with_codes(self, rows: list[list]) -> tuple[dict, torch.Tensor]:
        """A batch that has the codes in place of the tower's output."""
        inputs, targets = self.captions.batch(rows)
        places, symbols = symbols_of([p for row in rows for p in row], inputs["image_grid_thw"])
        del inputs["pixel_values"]
        rows = self.codes[places, symbols]  # [N, H]
        return inputs | {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=(rows,))}}, targets

    def of_tower(self, step: int):
        pictures = [p for row in self.draw(2, step, 32) for p in row]
        images = self.captions.process(pictures)
        places, symbols = symbols_of(pictures, images["image_grid_thw"])
        rows = self.model.model.visual(images["pixel_values"], images["image_grid_thw"]).pooler_output
        distances = (rows[:, None] - self.codes.detach()[places]).pow(2).sum(-1)  # [N, symbols]
        own = distances.gather(1, symbols[:, None])
        return F.cross_entropy(-2 * distances, symbols) + 0.5 * own.mean()

    def together(self, step: int):
        return F.cross_entropy(*answers(self.model, *self.captions.batch(self.draw(3, step, 12, 2))))

    def of_head(self, step: int):
        losses, _ = self.drafts(*self.captions.batch(self.draw(4, step, 12, 2)))
        return sum(w * loss for w, loss in zip(HEAD_WEIGHTS, losses))

    def drafts(self, inputs: dict, targets: torch.Tensor) -> tuple[list, list]:
        """-> for each draft its loss, and the share that is the model's own choice.

        Row i takes the embedding of position i + 1, an image's row where that is an image's, and hidden state i, at the
        positions of i. Draft d + 1 of row i sees the rows up to i and the drafts of row i alone, as in decoding.
        """
        with torch.no_grad():
            embeddings, positions, hidden = self.backbone(inputs)
            choice = F.linear(hidden, self.model.lm_head.weight)  # [B, T, V]
        T = hidden.shape[1] - DEPTH
        rows = torch.arange(T)
        causal, own = rows[:, None] >= rows[None, :], rows[:, None] == rows[None, :]
        h, cache, losses, shares = hidden[:, :T], DynamicCache(), [], []
        for d in range(DEPTH):
            mask = torch.cat([causal] + [own] * d, dim=1)[None, None]
            rotary = self.model.model.language_model.rotary_emb(h, positions[:, :, d : d + T])
            h = self.head(embeddings[:, d + 1 : d + 1 + T], h, rotary, mask, cache)
            said = targets[:, d + 1 : d + 1 + T] != -100  # the model writes what the draft guesses
            logits, wanted = F.linear(h[said], self.model.lm_head.weight), choice[:, d + 1 : d + 1 + T][said]
            losses.append(F.cross_entropy(logits, wanted.softmax(-1)))
            shares.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean().item())
        return losses, shares

    def backbone(self, inputs: dict):
        """-> embeddings with the images' rows [B, T, H], positions [3, B, T], hidden states [B, T, H]."""
        model, ids = self.model.model, inputs["input_ids"]
        rows = model.visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        embeddings = model.get_input_embeddings()(ids).masked_scatter((ids == self.captions.image)[..., None], rows)
        positions, _ = model.get_rope_index(ids, inputs["mm_token_type_ids"], inputs["image_grid_thw"])
        hidden = model.language_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
        return embeddings, positions, hidden.last_hidden_state

    @torch.no_grad()
    def acceptance(self) -> str:
        rng = random.Random(4)
        _, shares = self.drafts(*self.captions.batch([[draw_picture(rng, True)] for _ in range(50)]))
        return "drafts that are the model's choice " + ", ".join(f"{share:.3f}" for share in shares)


@torch.no_grad()
def evaluate(model, batch, n: int, seed: int = 1) -> str:
    """How many captions of n held-out pictures are right in full, as a line; ``batch`` makes a batch of rows of pictures."""
    rng, right = random.Random(seed), {kind: [] for kind in KINDS}
    pictures = [draw_picture(rng, True) for _ in range(n)]
    for i in range(0, n, 25):
        part = pictures[i : i + 25]
        for picture, ok in zip(part, exact(model, *batch([[p] for p in part]))):
            right[picture.kind].append(ok)
    shares = ", ".join(f"{kind} {sum(x)}/{len(x)}" for kind, x in right.items())
    return f"held-out captions right {sum(map(sum, right.values()))}/{n} ({shares})"


def exact(model, inputs: dict, targets: torch.Tensor) -> list[bool]:
    """Whether each token of a caption is the model's choice after those before it: then greedy decoding writes it."""
    logits, wanted = answers(model, inputs, targets)
    wrong = torch.zeros_like(targets, dtype=torch.bool)
    wrong[targets != -100] = logits.argmax(-1) != wanted
    return (~wrong.any(dim=1)).tolist()


@torch.no_grad()
def answer(model, captions: Captions, pictures: list, n: int = 32) -> tuple[str, float]:
    """What the model writes of the last picture, greedily, after the others with their captions.

    Each token is computed from the whole anew. Returns the text, and how far the closest top two logits are apart.
    """
    inputs, targets = captions.batch([pictures])
    length = int((targets[0] != -100).nonzero()[-1]) + 1 - len(captions.encode(pictures[-1].caption + QUOTES))
    ids, tokens, gaps = inputs["input_ids"][:, :length], [], []
    while len(tokens) < n and END not in tokens:
        inputs |= {"input_ids": ids, "mm_token_type_ids": (ids == captions.image).int()}
        top = model(**inputs, use_cache=False).logits[0, -1].topk(2)
        tokens.append(top.indices[0].item())
        gaps.append((top.values[0] - top.values[1]).item())
        ids = torch.cat([ids, top.indices[None, :1]], dim=1)
    return captions.tokenizer.decode(tokens), min(gaps)


def export(model, captions: Captions, folder: Path, n: int) -> None:
    """Write what was trained in bfloat16, and n held-out pictures with their captions and what the model answers."""
    tower, attention = trained_tensors(model)
    weights = {name: p.data.to(torch.bfloat16) for name, p in (tower | attention).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False)
    print("in bfloat16,", evaluate(model, captions.batch, 200, seed=2))
    rng, records = random.Random(3), []
    pictures = [draw_picture(rng, True, kind) for kind in KINDS for _ in range(n // len(KINDS))]
    for i, picture in enumerate(pictures):
        file = f"{i:02}-{picture.kind}.png"
        picture.image.save(folder / file, optimize=True)
        text, gap = answer(model, captions, [picture])
        records.append({"file": file, "caption": picture.caption, "answer": text, "gap": round(gap, 3)})
    two = []
    for i in range(0, n, 3):
        text, gap = answer(model, captions, [pictures[i], pictures[(i + 7) % n]])
        two.append({"files": [records[k]["file"] for k in (i, (i + 7) % n)], "answer": text, "gap": round(gap, 3)})
    (folder / "captions.json").write_text(json.dumps({"prompt": QUOTES, "one": records, "two": two}, indent=1) + "\n")


class Stage:
    """Parameters, their optimizers and the number of steps done; ``save`` and ``resume`` keep them in a file."""

    def __init__(self, file: Path, parameters: dict[str, nn.Parameter], steps: int, rates: tuple, loss):
        self.file, self.parameters, self.steps, self.loss, self.step = file, parameters, steps, loss, 0
        # Muon for the matrices, AdamW for the rest.
        matrices, others = [], []
        for name, p in parameters.items():
            (matrices if p.ndim == 2 and "pos_embed" not in name else others).append(p)
        self.rates = {
            torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="original"): rates[0],
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0): rates[1],
        }

    def resume(self) -> None:
        if not self.file.exists():
            return
        state = torch.load(self.file, weights_only=True)
        for name, p in self.parameters.items():
            p.data.copy_(state["parameters"][name])
        for optimizer, saved in zip(self.rates, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        print(f"{self.file}: resuming at step {self.step}")

    def save(self) -> None:
        state = {
            "parameters": {name: p.data for name, p in self.parameters.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.rates],
            "step": self.step,
        }
        new = self.file.with_suffix(".tmp")
        torch.save(state, new)
        os.replace(new, self.file)

    def do_step(self) -> float:
        """One optimizer step -> the loss."""
        for optimizer, rate in self.rates.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * learning_rate(self.step, self.steps)
            optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimizer in self.rates:
            optimizer.step()
        self.step += 1
        return loss.item()

    def train(self, every: int, figures) -> None:
        """Train to the last step; every so many steps save, and print ``figures()``."""
        self.resume()
        bar = tqdm(total=self.steps, initial=self.step, unit="step", desc=self.file.stem, disable=None)
        mean = None
        while self.step < self.steps:
            loss = self.do_step()
            mean = loss if mean is None else 0.95 * mean + 0.05 * loss
            bar.update()
            bar.set_postfix(loss=f"{mean:.3f}")
            if self.step % every == 0 or self.step == self.steps:
                self.save()
                now = time.strftime("%H:%M:%S")
                print(f"{now} {self.file.stem} step {self.step}: loss {mean:.4f} {figures()}", flush=True)
        bar.close()


def learning_rate(step: int, steps: int) -> float:
    """A factor: linear warm-up over 20 steps, flat, then linear to zero over the last 40 %."""
    return min((step + 1) / 20, 1.0, (steps - step) / (0.4 * steps))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a vision encoder for the demo of mlx_mtp.")
    parser.add_argument("--output", type=Path, default=Path("captions"), help="Folder (default: captions).")
    parser.add_argument(
        "--steps", type=int, nargs=4, default=(200, 5300, 150, 200), help="Of the stages (200 5300 150 200)."
    )
    parser.add_argument("--threads", type=int, default=1, help="Threads of PyTorch (default: 1).")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # states that have decayed to denormals slow a CPU down many times
    modeling_qwen3_5.torch_chunk_gated_delta_rule = gated_delta_rule  # halves the time of a step
    args.output.mkdir(parents=True, exist_ok=True)
    write_files(args.output)
    model, captions = make_model(args.output), Captions(args.output)
    codes, (tower, attention) = make_codes(model, captions), trained_tensors(model)
    print(f"{sum(p.numel() for p in tower.values()):,} parameters in the tower")
    head = make_head(model)
    losses = Losses(model, captions, codes, head, args.seed)
    n_codes, n_tower, n_together, n_head = args.steps

    def share(batch):
        return lambda: evaluate(model, batch, 50)

    Stage(args.output / "codes.pt", {"codes": codes} | attention, n_codes, (0.005, 0.02), losses.of_codes).train(
        50, share(losses.with_codes)
    )
    Stage(args.output / "tower.pt", tower, n_tower, (0.01, 2e-3), losses.of_tower).train(500, share(captions.batch))
    Stage(args.output / "together.pt", tower | attention, n_together, (0.002, 3e-4), losses.together).train(
        50, share(captions.batch)
    )
    export(model, captions, args.output, 24)
    print(losses.acceptance())
    learned = {f"mtp.{name}": p for name, p in head.named_parameters()}
    Stage(args.output / "head.pt", learned, n_head, (0.005, 1e-3), losses.of_head).train(50, losses.acceptance)
    weights = {name: p.data.to(torch.bfloat16) for name, p in learned.items()}
    save_file(weights, args.output / "head.safetensors", metadata={"format": "pt"})
    print(f"written: {args.output}; the files *.pt can be deleted")


if __name__ == "__main__":
    main()
