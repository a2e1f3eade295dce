"""Small files are written completely or not at all, and errors name them."""

import mlx.core as mx
import pytest

from mlx_mtp.files import replacing, write_atomic
from tests.support.checkpoints import full_disk


def save(file, n):
    with replacing(file) as new:
        mx.save_safetensors(str(new), {"a": mx.zeros(n)})


WRITES = {"text": lambda file, n: write_atomic(file, "a" * n), "arrays": save}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_failure_leaves_the_old_file_and_is_an_error_that_names_it(tmp_path, write):
    file, missing = tmp_path / "file.safetensors", tmp_path / "none" / "file.safetensors"
    write(file, 10)
    before = file.read_bytes()
    with full_disk(1000), pytest.raises(OSError, match=f"^{file} could not be written: "):
        write(file, 10_000)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    write(file, 11)
    assert file.read_bytes() != before
    with pytest.raises(OSError, match=f"^{missing} could not be written: No such file or directory$"):
        write(missing, 10)
