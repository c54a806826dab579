"""The names of a head's classes beside a model: labels.json in our folders, id2label in a published config.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from monoblock.interop.folder import CONFIG
from monoblock.untrusted import inside, present, read_json

LABELS = "labels.json"


def labels_in(folder: Path) -> list[str]:
    """The names of a head's classes: ours by labels.json, theirs by id2label, unless those are numbers only."""
    if folder.is_file():
        return []
    if present(folder, LABELS):
        found = json.loads(inside(folder, LABELS).read_text(encoding="utf-8"))
        return [str(label) for label in found] if isinstance(found, list) else []
    named = read_json(inside(folder, CONFIG)).get("id2label")
    if not isinstance(named, dict) or sorted(named) != sorted(map(str, range(len(named)))):
        return []
    labels = [str(named[str(n)]) for n in range(len(named))]
    return [] if labels == [f"LABEL_{n}" for n in range(len(labels))] else labels


def write_labels(folder: Path, labels: Sequence[str], form: str) -> None:
    """Put the names beside a model that was written there."""
    if form == "hf":
        config = read_json(inside(folder, CONFIG))
        config["id2label"] = {str(number): label for number, label in enumerate(labels)}
        config["label2id"] = {label: number for number, label in enumerate(labels)}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        (folder / LABELS).write_text(json.dumps(list(labels), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
