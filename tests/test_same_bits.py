"""Whether compiled passes round as others do on a device."""

import mlx.core as mx

from mlx_mtp.layers.compiled import run
from mlx_mtp.layers.passes import Pass
from mlx_mtp.models.same_bits import LENGTHS, compiled_differences, report
from tests.support.decoding import PROMPT
from tests.support.models import tiny_model


def test_bits_are_equal_here():
    model = tiny_model("qwen3_5")
    differences = compiled_differences(model, PROMPT)
    assert differences == dict.fromkeys(LENGTHS, 0.0)
    assert model.drafting.compiled
    assert report(differences) == "Compiled passes over 1, 2, 5, 17 tokens give the same bits as uncompiled ones."


def test_a_device_that_rounds_otherwise_is_told(monkeypatch):
    def call(self, function, module, *inputs, **numbers):
        out = run(function, module, *inputs, **numbers)
        return out * 1.01 if self.compiled and isinstance(out, mx.array) else out

    monkeypatch.setattr(Pass, "call", call)
    differences = compiled_differences(tiny_model("qwen3_5"), PROMPT)
    assert all(d > 0 for d in differences.values())
    assert report(differences).startswith(
        "Compiled passes round differently here. The largest difference in a logit, by"
    )
