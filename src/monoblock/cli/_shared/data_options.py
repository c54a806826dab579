"""The option --data: the folder that contains the corpora."""

from __future__ import annotations

import os
from pathlib import Path

import click

FOLDER_HELP = "Folder that contains the corpora.  [default: $MONOBLOCK_DATA]"
folder_type = click.Path(path_type=Path, exists=True, file_okay=False)


def resolve_data_folder(folder: Path | None) -> Path | None:
    """Return the folder given by --data, or else the one in $MONOBLOCK_DATA."""
    default = os.environ.get("MONOBLOCK_DATA")
    return folder if folder is not None else Path(default) if default else None
