"""Translation and transliteration recipes over several seeds, compared with published results.

    python benchmarks/translation.py --data DIR --runs de-en en-de --seeds 1 2 3 --out benchmarks/results/multi30k.md
    python benchmarks/translation.py --runs de-en-cpu --keep runs/bench --out benchmarks/results/multi30k-cpu.md
    python benchmarks/translation.py --runs hi hi-back --more train.steps=8000
    python benchmarks/translation.py --smoke                # everything once, on toy pairs

Seconds are those of the training steps. BLEU is sacreBLEU (13a), with its signature below the table. Runs that are
finished in --keep or have a line in --rows are not trained again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

from _runs import Metrics, add_arguments, collect_rows, format_tables, run_folder, train_or_load

from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.recipe import read_recipe
from monoblock.tasks.evaluation_report import EvaluationRequest


class Job(NamedTuple):
    title: str
    recipe: str
    overrides: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("bleu_lowercased", "bleu", "bleu_tokenized", "chrf")
    published: str = ""


WORD_METRICS = ("accuracy", "top_k", "cer", "attested")
WORD_NOTE = (
    "Each source counts once; any target that the test split has for it is correct (`attested`: also those of the "
    "training split). No hypothesis is rescored."
)
JOBS = {
    "de-en": Job("Multi30k de→en", "multi30k", (), published="36.52 lower-cased BLEU, 9.04 M parameters, greedy"),
    "en-de": Job(
        "Multi30k en→de",
        "multi30k",
        ("seq2seq.direction=backward",),
        published="41.02 tokenised BLEU4, transformer-tiny",
    ),
    "de-en-cpu": Job("Multi30k de→en, two CPU cores", "multi30k-cpu"),
    "lstm": Job("Multi30k de→en, LSTM with attention", "multi30k-lstm"),
    "hi": Job(
        "Dakshina Hindi, Roman→native",
        "dakshina-hi",
        (),
        WORD_METRICS,
        "top-1 50.0 % (paper), 53.5 % (best repository without outside data)",
    ),
    "hi-back": Job(
        "Dakshina Hindi, native→Roman",
        "dakshina-hi",
        ("seq2seq.direction=backward",),
        WORD_METRICS,
    ),
    "names": Job("names of places and languages, Roman→Hindi", "transliterate-hi", (), WORD_METRICS),
    "names-back": Job(
        "names of places and languages, Hindi→Roman", "transliterate-hi", ("seq2seq.direction=backward",), WORD_METRICS
    ),
    "reverse": Job("reversed strings", "reverse", (), ("accuracy",)),
}
SMOKE_OVERRIDES = ["train.steps=2", "train.eval_every=2", "train.save_every=1", "train.warmup=1", "model.width=16"]


def run(job: Job, seed: int, folder: Path, data: Path | None, args: argparse.Namespace) -> Metrics:
    """Train once and return the metrics on the test split, or on --split."""
    overrides = [*job.overrides, *args.more, f"train.seed={seed}", *(SMOKE_OVERRIDES if args.smoke else ())]
    pipe, summary = train_or_load(job.recipe, overrides, folder, data)
    is_word_task = job.metrics == WORD_METRICS
    corpus, limit = read_recipe(job.recipe, overrides).data.corpus, 8 if args.smoke else None
    request = EvaluationRequest(data=corpus, folder=data, split=args.split, rescore=is_word_task, n_best=5, limit=limit)
    metrics = evaluate_request(pipe, request).metrics
    names = [*job.metrics, "signature", "split"]
    return summary | {name: metrics[name] for name in names if name in metrics}


def format_job(job: Job, rows: list[Metrics]) -> list[str]:
    if not rows:
        return []
    is_word_task = job.metrics == WORD_METRICS
    notes = [
        job.published and f"Published: {job.published}.",
        f"`{rows[0]['signature']}`" if "bleu" in job.metrics else "",
    ]
    notes.append(WORD_NOTE if is_word_task else "")
    return format_tables(job.title, rows, job.metrics, *notes)


def write_toy_corpora(folder: Path) -> Path:
    """Write small corpora in the right formats, for a smoke run."""
    for name in ("multi30k", "dakshina_hi"):
        (folder / name).mkdir()
    for split in ("train", "val", "test_2016_flickr"):
        for language, text in (("de", "Ein Hund, Nummer {}.\n"), ("en", "A dog, number {}.\n")):
            lines = "".join(text.format(number) for number in range(60))
            (folder / "multi30k" / f"{split}.{language}").write_text(lines, encoding="utf-8")
    for split in ("train", "dev", "test"):
        lines = "".join(f"{a}{b}{a}\t{a}{b}\t2\n" for a in "kgcj" for b in "aeiou")
        native = lines.translate({ord(roman): sign for roman, sign in zip("kgcjaeiou", "कगचजाेिोु", strict=True)})
        pairs = zip(lines.splitlines(), native.splitlines(), strict=True)
        rows = "".join(f"{roman.split(chr(9))[0]}\t{hindi.split(chr(9))[1]}\t2\n" for roman, hindi in pairs)
        (folder / "dakshina_hi" / f"hi.translit.sampled.{split}.tsv").write_text(rows, encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, list(JOBS))
    parser.add_argument("--split", help="split to evaluate on; use `valid` for choosing options  [test]")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        data = write_toy_corpora(temporary) if args.smoke else args.data
        for name in args.runs:

            def run_seed(seed: int, name: str = name) -> Metrics:
                return run(JOBS[name], seed, run_folder(args, temporary, name, seed), data, args)

            lines += format_job(JOBS[name], collect_rows(name, args, run_seed))
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
