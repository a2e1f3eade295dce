"""Train the demo checkpoint: a small Qwen3.5 with an MTP head that writes Python.

    pip install '.[dev]'
    python examples/train_demo.py --output demo

The text is the standard library of the Python that runs this script, and documents about two hundred short functions
and classes (``demo_documents.py``), so nothing is downloaded. The backbone is transformers' reference Qwen3.5, 24 layers
of 128; the head is built from the same library's decoder layer and RMSNorm. The loss is the next-token loss plus, for
drafts 1 to 3, the cross entropy of the head against the backbone's own distribution at the position it guesses, which
decides whether a draft is accepted.

The state of the training is kept in the output folder (``training.pt``): the same command resumes it. ``--init FOLDER``
begins with the weights and the tokenizer of a checkpoint that this script wrote.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_documents import documents
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers, trainers
from torch import nn
from tqdm import tqdm
from transformers import DynamicCache
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextModel,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

END = "<|endoftext|>"
TEMPLATE = Path(__file__).parents[1] / "src" / "mlx_mtp" / "demo" / "chat_template.jinja"
DEPTH = 3  # drafts that the head is trained for
HEAD_WEIGHTS = (0.5, 0.25, 0.15)  # of the losses of drafts 1, 2 and 3; the next token has 1.0
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3  # peak learning rates
OURS, THEIRS = "backbone.", "model.language_model."  # prefixes of the backbone's tensors, here and in the checkpoint
NOT_CODE = ("site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__")

TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "attention_dropout": 0.0,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    },
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}


def standard_library() -> tuple[list[str], list[str]]:
    """The sources of this Python's standard library: (to train on, held out: one file in twenty, by its name's hash)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if any(part in NOT_CODE for part in name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) < 200:
            continue
        digest = hashlib.sha256(str(name).encode()).digest()
        (held_out if digest[0] % 20 == 0 else train).append(text)
    return train, held_out


def train_tokenizer(texts: list[str], path: Path) -> Tokenizer:
    """A byte-level BPE of 4096 tokens that splits text as transformers does for every Qwen3.5; id 0 ends a text."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Qwen3_5Tokenizer().backend_tokenizer
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=TEXT_CONFIG["vocab_size"],
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(path))
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one row of token ids, each ended by id 0: [N] int64."""
    ids = []
    for encoding in tokenizer.encode_batch(texts):
        ids += encoding.ids + [0]
    return torch.tensor(ids)


class Head(nn.Module):
    """The MTP head in the layout of the published checkpoints (``mtp.*``)."""

    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        full_attention = config.layer_types.index("full_attention")
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full_attention)])
        self.layers[0].self_attn.layer_idx = 0  # its row in the key-value cache
        self.norm = Qwen3_5RMSNorm(size, eps)

    def forward(self, embeddings, hidden, rotary, mask, cache):
        """embeddings, hidden [B, T, H] -> hidden [B, T, H]."""
        x = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1)
        x = self.layers[0](self.fc(x), position_embeddings=rotary, attention_mask=mask, past_key_values=cache)
        return self.norm(x)


class Demo(nn.Module):
    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        self.backbone = Qwen3_5TextModel(config)
        self.mtp = Head(config)
        for p in self.mtp.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=config.initializer_range)
        scale = (2 * config.num_hidden_layers) ** -0.5  # GPT-2's scaling of what is added to the residual
        for name, p in self.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                p.data *= scale

    def logits(self, hidden):
        """hidden [B, T, H] -> [B, T, V]: the embedding is also the output layer."""
        return F.linear(hidden, self.backbone.embed_tokens.weight)

    def losses(self, window):
        """
        window [B, T + 1 + DEPTH] -> the next-token loss and, for each draft, (loss, top-1 accuracy, agreement).

        Accuracy counts the drafts that are the text's own token, agreement those that are the backbone's choice.
        """
        T = window.shape[1] - 1 - DEPTH
        hidden = self.backbone(window[:, : T + DEPTH], use_cache=False).last_hidden_state  # [B, T + DEPTH, H]
        next_token, target = backbone_loss(self.logits(hidden), window[:, 1 : T + DEPTH + 1])
        return next_token, self.draft_losses(window, hidden[:, :T], target)

    def draft_losses(self, window, h, target):
        """window [B, T + 1 + DEPTH], verified h [B, T, H], target [B, T + DEPTH, V] -> what ``losses`` says of each draft.

        Draft d + 1 of row i is fed token i + d + 1 and draft d's output; it sees the verified rows up to i and the drafts
        of row i alone, as in decoding.
        """
        B, T, _ = h.shape
        rows = torch.arange(T, device=window.device)
        causal = rows[:, None] >= rows[None, :]
        own = rows[:, None] == rows[None, :]
        cache, drafts = DynamicCache(), []
        for d in range(DEPTH):
            mask = torch.cat([causal] + [own] * d, dim=1)[None, None]
            e = self.backbone.embed_tokens(window[:, d + 1 : d + 1 + T])  # [B, T, H]
            positions = (rows + d).view(1, 1, -1).expand(3, B, -1)
            h = self.mtp(e, h, self.backbone.rotary_emb(h, positions), mask, cache)
            drafts.append(draft_loss(self.logits(h), target[:, d + 1 : d + 1 + T], window[:, d + 2 : d + 2 + T]))
        return drafts


@torch.compile
def backbone_loss(logits, text):
    """logits [B, T, V], text [B, T] -> the next-token loss, and the backbone's distribution [B, T, V]."""
    logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), text.flatten()), logits.detach().softmax(-1)


@torch.compile
def draft_loss(logits, target, text):
    """logits and target [B, T, V], text [B, T] -> (loss, top-1 accuracy, agreement)."""
    loss = -(target * logits.float().log_softmax(-1)).sum(-1).mean()
    choice = logits.argmax(-1)
    return loss, (choice == text).float().mean(), (choice == target.argmax(-1)).float().mean()


class Training:
    """A model, its optimizers and the number of steps done; ``save`` and ``resume`` keep them in a file."""

    def __init__(self, model: Demo, file: Path, steps: int, factor: float):
        self.model, self.file, self.steps, self.factor, self.step = model, file, steps, factor, 0
        # Muon for the matrices inside the layers, AdamW for the embedding, the norms, the gates and the convolutions.
        matrices, others = [], []
        for name, p in model.named_parameters():
            (matrices if p.ndim == 2 and "embed_tokens" not in name else others).append(p)
        self.optimizers = {
            torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.02, adjust_lr_fn="original"): MATRIX_RATE,
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0): OTHER_RATE,
        }

    def resume(self) -> None:
        if not self.file.exists():
            return
        state = torch.load(self.file, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        print(f"resuming at step {self.step}")

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        new = self.file.with_suffix(".tmp")
        torch.save(state, new)
        os.replace(new, self.file)

    def do_step(self, window: torch.Tensor) -> tuple[float, float]:
        """One optimizer step on window [B, L] -> the next-token loss, and the first draft's agreement."""
        for optimizer, rate in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self.factor * rate * learning_rate(self.step, self.steps)
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast(window.device.type, torch.bfloat16):
            next_token, drafts = self.model.losses(window)
        loss = next_token + sum(w * d[0] for w, d in zip(HEAD_WEIGHTS, drafts))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        if math.isnan(value := next_token.item()):
            raise SystemExit(f"the loss is not a number at step {self.step}: lower the learning rates")
        return value, drafts[0][2].item()


def learning_rate(step: int, steps: int) -> float:
    """A factor: linear warm-up over 2 % of the steps, flat, then linear to zero over the last 40 %."""
    return min((step + 1) / (0.02 * steps), 1.0, (steps - step) / (0.4 * steps))


@torch.no_grad()
def evaluate(model: Demo, ids: torch.Tensor, length: int) -> str:
    model.eval()
    size = length + 1 + DEPTH
    windows = ids[: len(ids) // size * size].view(-1, size)[:64]
    results = [model.losses(w) for w in windows.split(8)]
    model.train()
    line = f"held-out loss {sum(float(r[0]) for r in results) / len(results):.3f}"
    for d in range(DEPTH):
        _, accuracy, agreement = (sum(float(r[1][d][k]) for r in results) / len(results) for k in range(3))
        line += f", draft {d + 1} accuracy {accuracy:.3f} agreement {agreement:.3f}"
    return line


def begin_with(model: Demo, folder: Path) -> None:
    """Take the weights that ``save`` wrote."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.replace(THEIRS, OURS, 1): p.float() for name, p in weights.items()})


def save(model: Demo, folder: Path) -> None:
    """Write the raw Hugging Face layout: bfloat16, norms zero-centred, ``model.language_model.*`` and ``mtp.*``."""
    weights = {
        name.replace(OURS, THEIRS, 1): p.to(torch.bfloat16).contiguous() for name, p in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": TEXT_CONFIG,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # Without a temperature: it completes code best with the most likely tokens.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}, indent=2) + "\n")
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": TEXT_CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    (folder / TEMPLATE.name).write_bytes(TEMPLATE.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo checkpoint of mlx_mtp to write Python.")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="Folder of the checkpoint (default: demo).")
    parser.add_argument("--steps", type=int, default=1500, help="Optimizer steps (default: 1500).")
    parser.add_argument("--batch", type=int, default=8, help="Windows in a step (default: 8).")
    parser.add_argument("--length", type=int, default=512, help="Tokens in a window (default: 512).")
    parser.add_argument("--documents", type=int, default=12000, help="Documents about functions (default: 12000).")
    parser.add_argument("--init", type=Path, help="Folder of a checkpoint to begin with.")
    parser.add_argument("--rate", type=float, default=1.0, help="Factor of the learning rates (default: 1.0).")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action="store_true", help="Compile with torch.compile: faster, needs a C++ compiler."
    )
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)  # states that have decayed to denormals slow a CPU down many times
    args.output.mkdir(parents=True, exist_ok=True)
    texts, held_out_texts = standard_library()
    texts += documents(args.documents, args.seed)
    if args.init is not None:
        shutil.copyfile(args.init / "tokenizer.json", args.output / "tokenizer.json")
    tokenizer = train_tokenizer(texts, args.output / "tokenizer.json")
    ids, held_out = encode(tokenizer, texts), encode(tokenizer, held_out_texts).to(args.device)
    print(
        f"{len(ids):,} tokens to train on, {len(held_out):,} held out, {args.steps * args.batch * args.length:,} a run"
    )
    config = Qwen3_5TextConfig(**TEXT_CONFIG)
    config._attn_implementation = "sdpa"
    model = Demo(config).float()
    if args.init is not None:
        begin_with(model, args.init)
    model.to(args.device)
    if args.compile:
        for layer in model.backbone.layers:
            layer.compile()
    else:
        torch.compiler.set_stance("force_eager")  # for the losses, which are decorated
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    training = Training(model, args.output / "training.pt", args.steps, args.rate)
    training.resume()
    train(training, ids, held_out, args)
    model.cpu()
    save(model, args.output)
    print(f"written: {args.output}; {training.file} can be deleted")


def train(training: Training, ids: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace) -> None:
    """Train to the last step; every 100 steps save and evaluate."""
    bar = tqdm(total=args.steps, initial=training.step, unit="step", disable=None)
    mean = None
    while training.step < args.steps:
        loss, agreement = training.do_step(draw_windows(ids, training.step, args).to(args.device))
        mean = loss if mean is None else 0.98 * mean + 0.02 * loss
        bar.update()
        bar.set_postfix(loss=f"{mean:.3f}", draft=f"{agreement:.2f}")
        if training.step % 100 == 0 or training.step == args.steps:
            training.save()
            figures = evaluate(training.model, held_out, args.length)
            print(f"{time.strftime('%H:%M:%S')} step {training.step}: loss {mean:.3f}; {figures}", flush=True)
    bar.close()


def draw_windows(ids: torch.Tensor, step: int, args: argparse.Namespace) -> torch.Tensor:
    """Windows [B, length + 1 + DEPTH], which depend on the step's number alone: a resumed run sees the same text.

    Half of them begin where a text begins, as prompts do, the others anywhere.
    """
    size = args.length + 1 + DEPTH
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(ids) - size, (args.batch,), generator=generator)
    beginnings = (ids[:-size] == 0).nonzero().flatten() + 1
    n = args.batch // 2
    starts[:n] = beginnings[torch.randint(len(beginnings), (n,), generator=generator)]
    return torch.stack([ids[s : s + size] for s in starts])


if __name__ == "__main__":
    main()
