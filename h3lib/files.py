"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def write_json(path: Path | str, content: object, indent: int | None = 1) -> None:
    """Write `content` to a temporary name in the same folder, then rename: whole or not there.

    What was at `path` stays until then. **Raises:** OSError if the folder cannot be written,
    TypeError or ValueError for what JSON cannot hold; then nothing is left behind.
    """
    path = Path(path)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        try:
            json.dump(content, file, indent=indent)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
