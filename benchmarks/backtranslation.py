"""Back-translation compared with none: Multi30k en→de from 5,000 pairs and 24,000 German sentences.

    python benchmarks/backtranslation.py --data DIR --jobs 10 --seeds 1,2 --write     # one GPU, a few minutes
    python benchmarks/backtranslation.py --smoke                                      # everything once, toy pairs

Every arm has the same steps, tokenizer and seeds. The model that generates sources is trained once per seed, and its
beam hypotheses are shared by the arms with noise or tags. Arms that are finished in --out are not trained again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from _report import device_name
from translation import write_toy_corpora

from monoblock.experiments import backtranslation
from monoblock.experiments.arms import ExperimentResult

RESULTS = Path(__file__).with_name("results") / "backtranslation.md"
PUBLISHED = "+2.1 to +3.4 BLEU (Sennrich et al. 2016, low-resource pairs, plain beam)"
# A small model, so that several share a GPU: a step of it is limited by kernel launches.
OVERRIDES = (
    "seq2seq.direction=backward",
    "model.depth=3",
    "tokenizer.dropout=0.0",  # it needs one or two cores per process
    "train.compile=graphs",
    "train.workers=0",
    "train.eval_every=0",
    "train.save_every=100",
    "generate.scored_rows=0",
)
SMOKE_OVERRIDES = (
    "model.width=16",
    "model.heads=2",
    "train.steps=4",
    "train.save_every=2",
    "train.warmup=1",
    "tokenizer.vocab=300",
)


def format_result(result: ExperimentResult) -> str:
    """Return a table of the arms: mean, gain and deviation over the seeds, and every value."""
    about = result.about
    columns, rows = result.table()
    lines = [
        f"{about['pairs']:,} pairs, {about['target_sentences']:,} German sentences, {about['ratio']:g} synthetic pairs "
        f"per real pair, {about['steps']:,} steps per arm, seeds {about['seeds']}; split {about['split']}; "
        f"{device_name()}, "
        f"torch {torch.__version__}.  Published: {PUBLISHED}.",
        "",
        f"| {' | '.join([*columns, 'each seed'])} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row, arm in zip(rows, result.rows, strict=True):
        cells = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append(f"| {' | '.join([*cells, ', '.join(f'{value:.2f}' for value in arm.values)])} |")
    changes = " ".join(about["changes"])
    return "\n".join([*lines, "", f"`{about['signature']}`; recipe {about['recipe']} with {changes}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--arms", default=",".join(backtranslation.ARMS))
    parser.add_argument("--more", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--out", type=Path, help="folder of the arms, in which an interrupted experiment continues")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        data = write_toy_corpora(Path(temporary)) if args.smoke else Path(args.data) if args.data else None
        folder = args.out or Path(temporary) / "arms"
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"pairs": 20, "monolingual": 40, "limit": 4} if args.smoke else {}
        options = backtranslation.Options(arms=args.arms, seeds=args.seeds, jobs=args.jobs, **sizes)
        overrides = [*OVERRIDES, f"train.steps={args.steps}", *args.more, *(SMOKE_OVERRIDES if args.smoke else ())]
        for event in backtranslation.run(options, overrides, folder, data):
            if not isinstance(event, ExperimentResult):
                print(f"{time.perf_counter() - start:6.0f} s  {event}", flush=True)
                continue
            text = format_result(event)
            print(text)
            if args.write:
                RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
