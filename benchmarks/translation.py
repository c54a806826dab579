"""Translation and transliteration beside published tables: trained from recipes, some seeds each, one table.

    python benchmarks/translation.py --data DIR --runs de-en en-de --seeds 1 2 3 --out benchmarks/results/multi30k.md
    python benchmarks/translation.py --runs de-en-cpu --keep runs/bench --out benchmarks/results/multi30k-cpu.md
    python benchmarks/translation.py --runs hi hi-back --more train.steps=8000
    python benchmarks/translation.py --smoke                # everything once, on a few made-up pairs

Seconds are those of the training steps alone.  BLEU is sacreBLEU (13a); its signature stands below the table.  A run
that is finished under --keep or has its line in --rows is not trained again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

from _runs import Figures, found, options, place, table, trained

from monoblock.tasks.evaluation import Asked, evaluate
from monoblock.tasks.recipe import read


class Job(NamedTuple):
    what: str
    recipe: str
    overrides: tuple[str, ...] = ()
    figures: tuple[str, ...] = ("bleu_lowercased", "bleu", "bleu_tokenized", "chrf")
    published: str = ""


WORDS = ("accuracy", "top_k", "cer")
RESCORED = ("attested", "rescored top-1", "rescored top_k", "weight")
COUNTED = (
    "Each source counts once; any target that the test split attests for it is right (`attested`: those of the "
    "training split, too).  Rescored: with the frequency of words among the training targets, its weight tuned on the "
    "validation split."
)
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


def run(job: Job, seed: int, folder: Path, data: Path | None, given: argparse.Namespace) -> Figures:
    """One training and its figures on the test split, or the one asked for."""
    words = [*job.overrides, *given.more, f"train.seed={seed}", *(SMALL if given.smoke else ())]
    pipe, about = trained(job.recipe, words, folder, data)
    single = job.figures == WORDS
    corpus, limit = read(job.recipe, words).data.corpus, 8 if given.smoke else None
    asked = Asked(data=corpus, folder=data, split=given.split, rescore=single, n_best=5, limit=limit)
    figures = evaluate(pipe, asked).figures
    if single:
        again = figures["rescored"]
        figures |= {"rescored top-1": again["accuracy"], "rescored top_k": again["top_k"], "weight": again["weight"]}
    kept = [*job.figures, *(RESCORED if single else ()), "signature", "split"]
    return about | {name: figures[name] for name in kept if name in figures}


def shown(job: Job, rows: list[Figures]) -> list[str]:
    if not rows:
        return []
    single = job.figures == WORDS
    notes = [
        job.published and f"Published: {job.published}.",
        f"`{rows[0]['signature']}`" if "bleu" in job.figures else "",
    ]
    notes.append(COUNTED if single else "")
    return table(job.what, rows, [*job.figures, *(RESCORED if single else ())], *notes)


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
    options(parser, list(JOBS))
    parser.add_argument("--split", help="what is measured  [test]; `valid` to choose by")
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        data = made_up(made) if given.smoke else given.data
        for name in given.runs:

            def make(seed: int, name: str = name) -> Figures:
                return run(JOBS[name], seed, place(given, made, name, seed), data, given)

            lines += shown(JOBS[name], found(name, given, make))
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
