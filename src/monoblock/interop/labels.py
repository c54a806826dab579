"""Class names stored with a model: labels.json in a monoblock folder, id2label in a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from monoblock.errors import FileError
from monoblock.interop.config_file import CONFIG_FILE
from monoblock.untrusted_files import has_file, parse_json, read_bytes, read_json, safe_join, write_atomically

LABELS_FILE = "labels.json"


def read_labels(folder: Path) -> list[str]:
    """Return the class names of a model, or [] if there are none or only placeholders (LABEL_0, LABEL_1, …)."""
    if folder.is_file():
        return []
    if has_file(folder, LABELS_FILE):
        labels = parse_json(read_bytes(safe_join(folder, LABELS_FILE)), str(folder / LABELS_FILE))
        if not isinstance(labels, list) or not all(isinstance(label, str | int | float) for label in labels):
            raise FileError(f'{folder / LABELS_FILE} is not a JSON list of labels; write them as ["no", "yes"]')
        return [str(label) for label in labels]
    id2label = read_json(safe_join(folder, CONFIG_FILE)).get("id2label")
    if not isinstance(id2label, dict) or sorted(id2label) != sorted(map(str, range(len(id2label)))):
        return []
    labels = [str(id2label[str(n)]) for n in range(len(id2label))]
    return [] if labels == [f"LABEL_{n}" for n in range(len(labels))] else labels


def write_labels(folder: Path, labels: Sequence[str], model_format: str) -> None:
    """Store class names in a folder that already contains a model; `model_format` is "hf" or "monoblock"."""
    if model_format == "hf":
        config = read_json(safe_join(folder, CONFIG_FILE))
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
        write_atomically(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    else:
        text = json.dumps(list(labels), indent=2, ensure_ascii=False) + "\n"
        write_atomically(folder / LABELS_FILE, text)
