"""Checkpoints: loading, the formats of heads, the hub, and tuned settings."""

from pathlib import Path

import mlx.core as mx

DEMO = Path(__file__).parents[1] / "demo"
DEMO_NOTE = "Demo model: completes Python only"
AUTO = "auto"  # the value of ``dtype`` that is the checkpoint's
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
