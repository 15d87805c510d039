"""Files that are complete at any time, and their checksums."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def checksum(*paths: Path) -> str:
    """The SHA-256 of a file, or of several one after another."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, content: Any, indent: int | None = 2) -> None:
    """Writes a file in JSON, which takes its name once it is complete.

    Args:
        path: the file.
        content: what it holds.
        indent: the spaces of each level; None writes a single line.

    Raises:
        ValueError: for numbers that are not finite: JSON has none.
    """
    partial = path.with_name(f"{path.name}.partial")
    text = json.dumps(content, indent=indent, allow_nan=False)
    partial.write_text(f"{text}\n", encoding="utf-8")
    os.replace(partial, path)
