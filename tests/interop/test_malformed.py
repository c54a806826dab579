"""Malformed and hostile files (malformed_files.py) end in a one-line error; nothing is run and nothing else is read."""

import json
import time
from pathlib import Path

import pytest
from processes import run_script

import monoblock as mb
from monoblock.interop.huggingface.export import export_hf

pytest.importorskip("gguf")

MAX_SECONDS = 10.0  # of processor time, so that a busy machine changes nothing
MAX_PICKLE_SECONDS = 30.0  # a pickle is read by a separate process, which first imports torch
MAX_MEGABYTES = 256  # beyond what reading valid files takes


def test_a_malformed_file_is_a_one_line_error_soon_and_nothing_is_run_or_read_elsewhere(tmp_path):
    program = Path(__file__).parents[1] / "malformed_files.py"
    process = run_script(program, tmp_path.resolve())
    assert process.returncode == 0, process.stderr[-2000:]
    report = json.loads(process.stdout)
    results = report["results"]
    assert len(results) >= 500
    wrong = [row for row in results if not row["error"] or "\n" in row["message"] or not 0 < len(row["message"]) < 500]
    assert not wrong, wrong[:5]
    limits = [MAX_PICKLE_SECONDS if row["name"].startswith("pickle") else MAX_SECONDS for row in results]
    slow = [row for row, limit in zip(results, limits, strict=True) if row["seconds"] > limit]
    assert [(row["name"], row["seconds"]) for row in slow] == []
    assert report["megabytes"] < MAX_MEGABYTES
    assert len(report["control"]) == 2, "the audit hook must see a file opened and a program started"
    assert report["events"] == []
    assert not report["canary"]


def test_thousands_of_layers_in_a_configuration_are_refused_soon(tmp_path):
    export_hf(mb.Transformer(mb.t5(vocab=20, width=8, depth=1, heads=1)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_layers": 2000, "num_decoder_layers": 2000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = time.process_time()
    with pytest.raises(mb.FileError, match="has 4,000 layers, but only"):
        mb.Transformer.from_pretrained(tmp_path)
    assert time.process_time() - start < MAX_SECONDS
