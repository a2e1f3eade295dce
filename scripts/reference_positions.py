"""Write tests/data/images: a tiny random checkpoint with a vision tower, and transformers' values for prompts with images.

    pip install torch transformers==5.23.0 pillow
    python -m scripts.reference_positions

``tests/data/images/README.md`` says what is in each file. Everything is drawn from fixed seeds.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import Qwen2VLImageProcessorPil, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

FOLDER = Path(__file__).parents[1] / "tests/data/images"
GREEDY, DRAFTS = 24, 4  # tokens
CONVERSATIONS = 40
KINDS = ("TITIT", "ITIT", "TITI", "II", "I", "T", "TITITIIT")  # of conversations: texts and images
END, IMAGE_START, IMAGE_END, IMAGE, VIDEO = 256, 257, 258, 259, 260  # ids; those below are the bytes
SPECIAL = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "attention_dropout": 0.0,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
    "eos_token_id": END,
    "rope_parameters": {  # 8 frequencies: of height 1, 4 and 7, of width 2 and 5, as the published models have 32 of them
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
VISION_CONFIG = {
    "model_type": "qwen3_5",  # as in the published checkpoints
    "depth": 2,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
    "initializer_range": 0.02,
}
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END,
    "text_config": TEXT_CONFIG,
    "vision_config": VISION_CONFIG,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 4096},  # pixels, not edges
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# A prompt: the length of a text, or the (height, width) in pixels of an image. "bare" images stand without their start and end.
PROMPTS = [
    ((7, (16, 24), 5, (24, 16), 6), ""),
    (((30, 19), 4, (9, 40), 3, (8, 8)), ""),
    (((16, 16), 3, (40, 24)), "bare"),
    ((3, (8, 8), (33, 60), 12, (64, 8), (24, 24), 9, (70, 90), 1), ""),
]


class Model(nn.Module):
    """Qwen3.5 with its vision tower, and the head in the layout of the published checkpoints (``mtp.*``)."""

    def __init__(self):
        super().__init__()
        config = Qwen3_5Config.from_dict(CONFIG)
        config._attn_implementation = "eager"
        for part in (config.text_config, config.vision_config):
            part._attn_implementation = "eager"
        self.backbone, text = Qwen3_5ForConditionalGeneration(config), config.text_config
        self.mtp = nn.ModuleDict(
            {
                "pre_fc_norm_embedding": Qwen3_5RMSNorm(text.hidden_size, text.rms_norm_eps),
                "pre_fc_norm_hidden": Qwen3_5RMSNorm(text.hidden_size, text.rms_norm_eps),
                "fc": nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False),
                "layers": nn.ModuleList([Qwen3_5DecoderLayer(text, text.layer_types.index("full_attention"))]),
                "norm": Qwen3_5RMSNorm(text.hidden_size, text.rms_norm_eps),
            }
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """By the names of the published checkpoints."""
        return {name.removeprefix("backbone."): p for name, p in self.state_dict().items()}

    def positions(self, ids, grids):
        """ids [T], grids [n, 3] in patches -> three-axis positions [3, T], and the delta from a plain position."""
        ids = torch.tensor(ids)[None]
        grids = torch.tensor(grids) if len(grids) else None
        positions, delta = self.backbone.model.get_rope_index(ids, (ids == IMAGE).int(), grids)
        return positions[:, 0], delta.item()

    def run(self, ids, pixels, grids):
        """-> embeddings [T, H] with the images' rows, hidden states [T, H] and logits [T, V]."""
        ids, positions = torch.tensor(ids)[None], self.positions(ids, grids)[0]
        rows = self.tower(pixels, grids)
        embeddings = self.backbone.get_input_embeddings()(ids)
        embeddings = embeddings.masked_scatter((ids == IMAGE)[..., None], rows)
        hidden = self.backbone.model.language_model(
            inputs_embeds=embeddings, position_ids=positions[:, None], use_cache=False
        ).last_hidden_state
        return embeddings[0], hidden[0], self.backbone.lm_head(hidden[0])

    def tower(self, pixels, grids):
        """pixels [N, C * T * p * p] -> the rows that replace the placeholders' embeddings, [N / 4, H]."""
        return self.backbone.model.visual(torch.tensor(pixels), grid_thw=torch.tensor(grids)).pooler_output

    def head(self, embeddings, hidden, positions):
        """embeddings and hidden [T, H], positions [3, T] of the hidden states -> hidden states [T, H]."""
        mtp = self.mtp
        x = mtp["fc"](torch.cat([mtp["pre_fc_norm_embedding"](embeddings), mtp["pre_fc_norm_hidden"](hidden)], dim=-1))
        rotary = self.backbone.model.language_model.rotary_emb(x[None], positions[:, None])
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        x = mtp["layers"][0](x[None], position_embeddings=rotary, attention_mask=mask)
        return mtp["norm"](x)[0]


def random_model(seed: int) -> Model:
    """Weights of bfloat16, in float32, spread so that output varies and depends on the images."""
    torch.manual_seed(seed)
    model = Model().float().eval()
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape)
        if "norm" in name and p.ndim == 1:
            shift = name.endswith(("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight"))
            noise = 0.2 * noise + float(shift)  # the other norms multiply by 1 + w
        elif p.ndim == 1:
            noise = noise * (0.2 if name.endswith("bias") and "dt_bias" not in name else 1.0)
        elif "embed" not in name or "proj" in name:
            noise = noise * 2 * p[0].numel() ** -0.5
        p.data = noise.to(torch.bfloat16).float()
    return model


def make_prompt(parts, bare: str, rng, processor: Qwen2VLImageProcessorPil):
    """-> ids, images [h, w, 3] of bytes, pixels [N, C * T * p * p], grids [n, 3] in patches."""
    images = [random_image(rng, *part) for part in parts if not isinstance(part, int)]
    processed = processor(images, return_tensors="np")
    grids, ids, n = processed["image_grid_thw"].tolist(), [], 0
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(32, 127, part).tolist()
        else:
            ids += image_ids(*in_tokens(grids[n]), bare)
            n += 1
    return ids, images, processed["pixel_values"].astype(np.float32), grids


def in_tokens(grid) -> tuple[int, int]:
    """(rows, columns) of an image's tokens."""
    return grid[1] // VISION_CONFIG["spatial_merge_size"], grid[2] // VISION_CONFIG["spatial_merge_size"]


def image_ids(rows: int, columns: int, bare: str = "") -> list[int]:
    placeholders = [IMAGE] * (rows * columns)
    return placeholders if bare else [IMAGE_START, *placeholders, IMAGE_END]


def random_image(rng, height: int, width: int) -> np.ndarray:
    """Waves of three colours and some noise."""
    y, x = np.mgrid[:height, :width][..., None]
    waves = np.sin(x * rng.uniform(0.05, 0.9, 3) + y * rng.uniform(0.05, 0.9, 3) + rng.uniform(0, 6, 3))
    return np.clip(128 + 90 * waves + rng.normal(0, 20, (height, width, 3)), 0, 255).astype(np.uint8)


@torch.no_grad()
def prompt_values(model: Model, ids, pixels, grids) -> dict:
    """The values of one prompt; names as in the README of tests/data/images."""
    positions, delta = model.positions(ids, grids)
    embeddings, hidden, logits = model.run(ids, pixels, grids)
    greedy, gaps = continuation(model, ids, pixels, grids)
    rows = torch.cat([embeddings[1:], embedding(model, greedy[0])])  # row i has position i + 1's
    x, T = model.head(rows, hidden, positions), len(ids)
    head_logits = model.backbone.lm_head(x)
    tokens, draft_logits = [head_logits[-1].argmax().item()], [head_logits[-1]]
    for j in range(1, DRAFTS):
        rows, hidden = torch.cat([rows, embedding(model, tokens[-1])]), torch.cat([hidden, x[-1:]])
        plain = torch.full((3, 1), T + j - 1 + delta)
        positions = torch.cat([positions, plain], dim=1)
        x = model.head(rows, hidden, positions)
        draft_logits.append(model.backbone.lm_head(x[-1]))
        tokens.append(draft_logits[-1].argmax().item())
    return {
        "positions": positions[:, :T],
        "delta": delta,
        "tower": model.tower(pixels, grids),
        "logits": logits,
        "hidden": hidden[:T],
        "greedy": greedy,
        "greedy_gap": gaps,
        "mtp_logits": head_logits,
        "draft_tokens": tokens,
        "draft_logits": torch.stack(draft_logits),
    }


def embedding(model: Model, token: int):
    return model.backbone.get_input_embeddings()(torch.tensor([token]))


def continuation(model: Model, ids, pixels, grids) -> tuple[list[int], list[float]]:
    """The greedy tokens, each by a full recompute, and how far the top two logits are apart."""
    tokens, gaps = [], []
    for _ in range(GREEDY):
        top = model.run(ids + tokens, pixels, grids)[2][-1].topk(2)
        tokens.append(top.indices[0].item())
        gaps.append((top.values[0] - top.values[1]).item())
    return tokens, gaps


def random_conversation(rng: random.Random, k: int) -> tuple[list[int], list[tuple[int, int]]]:
    """-> ids, and the grid in tokens of each image."""
    kinds = KINDS[k % len(KINDS)]
    sizes = [(1, 1), (1, 9), (9, 1), (2, 3), (3, 2), (4, 4), (5, 2), (2, 7), (6, 11)]
    bare = "bare" if k % 3 == 2 and "II" not in kinds else ""  # two runs that touch would be one
    ids, grids = [], []
    for kind in kinds:
        if kind == "T":
            ids += [rng.randrange(32, 127) for _ in range(rng.choice([1, 2, 5, 12]))]
        else:
            grids.append(rng.choice(sizes))
            ids += image_ids(*grids[-1], bare)
    return ids, grids


def conversations(model: Model) -> list[dict]:
    rng, out = random.Random(0), []
    for k in range(CONVERSATIONS):
        ids, grids = random_conversation(rng, k)
        positions, delta = model.positions(ids, [(1, 2 * h, 2 * w) for h, w in grids])
        out.append({"input_ids": ids, "grids": grids, "position_ids": positions.tolist(), "delta": delta})
    return out


def write_tokenizer(folder: Path) -> None:
    """Bytes and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte_char(b): b for b in range(256)}, []))
    assert sorted(tokenizer.get_vocab()) == alphabet
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "pad_token": SPECIAL[0]}
    write_json(folder / "tokenizer_config.json", settings)


def byte_char(b: int) -> str:
    """The character of byte-level BPE for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(b) if b in printable else chr(256 + [i for i in range(256) if i not in printable].index(b))


def write_json(path: Path, value, **kwargs) -> None:
    path.write_text(json.dumps(value, **{"indent": 2, **kwargs}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write transformers' values for prompts with images.")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=1, help="Of the weights (default: 1).")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model = random_model(args.seed)
    weights = {name: p.to(torch.bfloat16).contiguous() for name, p in model.weights().items()}
    save_file(weights, args.output / "model.safetensors", metadata={"format": "pt"})
    write_json(args.output / "config.json", CONFIG)
    write_json(args.output / "preprocessor_config.json", PROCESSOR)
    write_json(args.output / "generation_config.json", {"eos_token_id": END})
    write_tokenizer(args.output)
    write_json(args.output / "positions.json", conversations(model), indent=None, separators=(",", ":"))

    values, rng, processor = {}, np.random.default_rng(0), Qwen2VLImageProcessorPil(**PROCESSOR)
    for j, (parts, bare) in enumerate(PROMPTS):
        ids, images, pixels, grids = make_prompt(parts, bare, rng, processor)
        found = prompt_values(model, ids, pixels, grids)
        generated = {*found["greedy"], *found["draft_tokens"]}
        if generated & {IMAGE, VIDEO}:
            raise SystemExit("a placeholder was generated: choose another seed")
        found = {"prompt": ids, "pixels": pixels, "grids": grids, **found}
        for name, value in found.items():
            array = np.asarray(value)
            values[f"{name}_{j}"] = array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
        for k, image in enumerate(images):
            values[f"image_{j}_{k}"] = image
        gap = min(found["greedy_gap"])
        print(f"prompt {j}: {len(ids)} tokens, closest top two {gap:.4f}, greedy {found['greedy']}")
    np.savez_compressed(args.output / "reference.npz", **values)


if __name__ == "__main__":
    main()
