import pytest

import mlx_mtp
from mlx_mtp.load import DEMO


@pytest.fixture(scope="session")
def demo():
    """The bundled checkpoint: (model, tokenizer)."""
    return mlx_mtp.load(str(DEMO))
