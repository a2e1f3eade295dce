"""The checkpoint of a fitted head: links to the backbone's files, and the file of the head."""

from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from ..checkpoint.config import Config, check_config
from ..checkpoint.storage.output import atomic_directory, write_config, write_weights
from ..checkpoint.storage.reader import CheckpointReader

USAGE = """
## Fitted MTP head

The MTP head of this checkpoint was trained with `mlx_mtp fit` for this backbone, which is
{model} without changes. The model generates the same text.

- Trained on: {trained_on}
- Measured on: {measured_on}

```
{table}
```
{adapter}
To restore the original head: `mlx_mtp convert --graft-mtp-from {original} --model {name} --mlx-path NEW`.
"""
WITH_ADAPTER = """
It was fitted on top of the adapter {adapter}: generate with `--adapter-path {adapter}`.
"""


def write_checkpoint(
    target: Path, source: Path, model: Any, name: str, adapter_path: str | None, record: dict[str, Any], table: str
) -> None:
    """Write the folder, which appears when it is complete.

    Args:
        source (Path): The folder of the fitted model.
        name (str): The model's name.
        record (Dict[str, Any]): The data of the fit.
        table (str): The acceptance before and after.
    """
    reader = CheckpointReader(str(source), None, False)
    config: Config = check_config(reader.config, name)
    fetched = model.fetched_head
    own = {"source": name, "revision": reader.revision}
    origin = config.get("mlx_mtp") or (own if fetched is None else fetched.record)
    parameters: Any = tree_flatten(model.mtp.parameters())
    head = {model.head_prefix + path: w for path, w in parameters}
    with atomic_directory(target) as folder:
        write_weights(folder, reader, head)
        config["mlx_mtp_fit"] = record
        write_config(folder, config, head, origin)
        with (folder / "README.md").open("a", encoding="utf-8") as card:
            card.write(
                USAGE.format(
                    model=name,
                    name=target,
                    original=origin.get("source") or name,
                    table=table,
                    adapter="" if adapter_path is None else WITH_ADAPTER.format(adapter=adapter_path),
                    **record,
                )
            )
