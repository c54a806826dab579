"""Translation and transliteration beside published tables: trained from recipes, some seeds each, one table.

    python benchmarks/translation.py --data DIR --runs de-en en-de --seeds 1 2 3 --out benchmarks/results/multi30k.md
    python benchmarks/translation.py --runs de-en-cpu --keep runs/bench --out benchmarks/results/multi30k-cpu.md
    python benchmarks/translation.py --runs hi hi-back --more train.steps=8000
    python benchmarks/translation.py --smoke                # everything once, on a few made-up pairs

Seconds are those of the training steps alone.  BLEU is sacreBLEU (13a); its signature stands below the table.  A run
that is finished under --keep is not trained again, and one that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monoblock.accounting.report import account
from monoblock.tasks.evaluation import Asked, evaluate
from monoblock.tasks.folder import RECIPE
from monoblock.tasks.pipeline import load
from monoblock.tasks.recipe import read
from monoblock.tasks.run import prepare
from monoblock.training import metrics


class Job(NamedTuple):
    what: str
    recipe: str
    overrides: tuple[str, ...] = ()
    figures: tuple[str, ...] = ("bleu_lowercased", "bleu", "bleu_tokenized", "chrf")
    published: str = ""


CARD = "README.md"  # the last file a run writes
WORDS = ("accuracy", "top_k", "cer")
JOBS = {
    "de-en": Job("Multi30k de→en", "multi30k", (), published="36.52 lower-cased BLEU, 9.04 M parameters, greedy"),
    "en-de": Job(
        "Multi30k en→de", "multi30k", ("data.direction=backward",), published="41.02 tokenised BLEU4, transformer-tiny"
    ),
    "de-en-cpu": Job("Multi30k de→en, two CPU cores", "multi30k-cpu"),
    "lstm": Job("Multi30k de→en, LSTM with attention", "multi30k-lstm"),
    "hi": Job(
        "Dakshina Hindi, Roman→native",
        "dakshina-hi",
        (),
        WORDS,
        "top-1 50.0 (paper), 53.5 (best repository without outside data)",
    ),
    "hi-back": Job(
        "Dakshina Hindi, native→Roman",
        "dakshina-hi",
        ("data.direction=backward",),
        WORDS,
    ),
    "names": Job("names of places and languages, Roman→Hindi", "transliterate-hi", (), WORDS),
    "names-back": Job(
        "names of places and languages, Hindi→Roman", "transliterate-hi", ("data.direction=backward",), WORDS
    ),
    "reverse": Job("reversed letters", "reverse", (), ("accuracy",)),
}
SMALL = ["train.steps=2", "train.eval_every=2", "train.save_every=1", "train.warmup=1", "model.width=16"]


def run(job: Job, seed: int, folder: Path, data: Path | None, given: argparse.Namespace) -> dict[str, Any]:
    """One training and its figures on the test split."""
    words = [*job.overrides, *given.more, f"train.seed={seed}", *(SMALL if given.smoke else ())]
    recipe = read(job.recipe, words)
    if not (folder / CARD).is_file():
        begun = (folder / RECIPE).is_file()
        for _ in prepare(recipe, folder, data=data, resume=begun).events(resume=begun):
            pass
    pipe = load(folder)
    words = job.figures == WORDS
    asked = Asked(data=recipe.data.corpus, folder=data, rescore=words, n_best=5, limit=8 if given.smoke else None)
    found = evaluate(pipe, asked).figures
    if words:
        found["rescored top-1"] = found["rescored"]["accuracy"]
    found["parameters"] = account(pipe.model.config).parameters
    found["seconds"] = sum(line.get("seconds", 0.0) for line in metrics.read(folder))
    return found


def row(job: Job, found: list[dict[str, Any]]) -> list[str]:
    """The lines of one job: every figure as mean, and deviation where there are several seeds."""
    names = [*job.figures, *(["rescored top-1"] if job.figures == WORDS else [])]
    lines = [f"### {job.what}", "", f"| {' | '.join(['seeds', *names, 'parameters', 'training seconds'])} |"]
    lines.append("|---" * (len(names) + 3) + "|")
    cells = [_mean([figures[name] for figures in found]) for name in names]
    seconds = _mean([figures["seconds"] for figures in found], 0)
    lines.append(f"| {len(found)} | {' | '.join(cells)} | {found[0]['parameters']:,} | {seconds} |")
    for figures in found:
        lines.append(f"| | {' | '.join(f'{figures[name]:.2f}' for name in names)} | | {figures['seconds']:.0f} |")
    signed = figures.get("signature") if "bleu" in job.figures else None
    notes = [job.published and f"Published: {job.published}.", signed and f"`{signed}`"]
    if job.figures == WORDS:
        notes.append("Each source counts once; any attested target is right.")
    return [*lines, "", *(note for note in notes if note), ""]


def _mean(values: list[float], digits: int = 2) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def made_up(folder: Path) -> Path:
    """Corpora of the right shape, for a run that only shows that everything works."""
    for name in ("multi30k", "dakshina_hi"):
        (folder / name).mkdir()
    for split in ("train", "val", "test_2016_flickr"):
        for language, text in (("de", "Ein Hund, Nummer {}.\n"), ("en", "A dog, number {}.\n")):
            lines = "".join(text.format(number) for number in range(60))
            (folder / "multi30k" / f"{split}.{language}").write_text(lines, encoding="utf-8")
    for split in ("train", "dev", "test"):
        lines = "".join(f"{a}{b}{a}\t{a}{b}\t2\n" for a in "kgcj" for b in "aeiou")
        native = lines.translate({ord(roman): sign for roman, sign in zip("kgcjaeiou", "कगचजाेिोु", strict=True)})
        both = zip(lines.splitlines(), native.splitlines(), strict=True)
        rows = "".join(f"{one.split(chr(9))[0]}\t{other.split(chr(9))[1]}\t2\n" for one, other in both)
        (folder / "dakshina_hi" / f"hi.translit.sampled.{split}.tsv").write_text(rows, encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--more", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="", help="what a reader of the table must know, such as a busy machine")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    changes = " ".join(given.more) or "none"
    note = f"  {given.note}" if given.note else ""
    lines = [f"Trained on {device}, torch {torch.__version__}; changes to the recipes: {changes}.{note}", ""]
    with tempfile.TemporaryDirectory() as place:
        data = made_up(Path(place)) if given.smoke else given.data
        for name in given.runs:
            folder = given.keep or Path(place) / "runs"
            found = [run(JOBS[name], seed, folder / f"{name}-{seed}", data, given) for seed in given.seeds]
            lines += row(JOBS[name], found)
            print("\n".join(row(JOBS[name], found)), flush=True)
    if given.out is not None:
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
