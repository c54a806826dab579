"""Back-translation beside no back-translation: Multi30k en→de from 5,000 pairs and 24,000 German sentences (Q8).

    python benchmarks/backtranslation.py --data DIR --jobs 10 --seeds 1,2 --write     # one GPU, some minutes
    python benchmarks/backtranslation.py --smoke                                      # everything once, made-up pairs

Every arm has the same steps, tokens, tokenizer and seeds; the model that makes the sources is trained once a seed, and
its beam hypotheses are shared by the arms that noise or tag.  What was made under --out is taken as it lies there.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from translation import made_up

from monoblock.experiments import backtranslation
from monoblock.experiments.arms import Result

RESULTS = Path(__file__).with_name("results") / "backtranslation.md"
PUBLISHED = "+2.1 to +3.4 BLEU (Sennrich et al. 2016, low-resource pairs, plain beam)"
# Small, so that some of them share a GPU: what a step costs there is launching its kernels.
CHANGES = (
    "data.direction=backward",
    "model.depth=3",
    "tokenizer.dropout=0.0",  # which costs a core or two for each process
    "train.compile=graphs",
    "train.workers=0",
    "train.eval_every=0",
    "train.save_every=100",
    "generate.measure=0",
)
SMALL = (
    "model.width=16",
    "model.heads=2",
    "train.steps=4",
    "train.save_every=2",
    "train.warmup=1",
    "tokenizer.vocab=300",
)


def table(found: Result) -> str:
    """The arms with means, gains and deviations over seeds, and every value."""
    about = found.about
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    columns, rows = found.table()
    lines = [
        f"{about['pairs']:,} pairs, {about['target_sentences']:,} German sentences, {about['ratio']:g} made pairs for "
        f"each real one, {about['steps']:,} steps an arm, seeds {about['seeds']}; split {about['split']}; {device}, "
        f"torch {torch.__version__}.  Published: {PUBLISHED}.",
        "",
        f"| {' | '.join([*columns, 'each seed'])} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row, arm in zip(rows, found.rows, strict=True):
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
    parser.add_argument("--out", type=Path, help="the folder of the arms; an interrupted experiment goes on there")
    parser.add_argument("--write", action="store_true", help=f"put the table into results/{RESULTS.name}")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        data = made_up(Path(place)) if given.smoke else Path(given.data) if given.data else None
        folder = given.out or Path(place) / "arms"
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"pairs": 20, "monolingual": 40, "limit": 4} if given.smoke else {}
        asked = backtranslation.Options(arms=given.arms, seeds=given.seeds, jobs=given.jobs, **sizes)
        words = [*CHANGES, f"train.steps={given.steps}", *given.more, *(SMALL if given.smoke else ())]
        for said in backtranslation.run(asked, words, folder, data):
            if not isinstance(said, Result):
                print(f"{time.perf_counter() - begun:6.0f} s  {said}", flush=True)
                continue
            text = table(said)
            print(text)
            if given.write:
                RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
