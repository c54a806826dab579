"""Parts of an inspection that take longer: the profile over lengths and batches, and probes on labelled data."""

from __future__ import annotations

from typing import Any

from monoblock.data.corpora.load import infer_corpus_kind, load_corpus
from monoblock.data.corpora.table import CORPORA
from monoblock.errors import InputError
from monoblock.inspection.probing import LabelledText, probe_layers
from monoblock.inspection.profile import ProfileRow, profile_sweep
from monoblock.plots.curves import draw_bars, draw_curves
from monoblock.plots.page import Section, metrics_table
from monoblock.runs.inspect.part import Part, Request
from monoblock.tasks.input_template import WordEncoder

DEFAULT_LENGTHS = (32, 64, 128, 256)
KINDS = {"attention": "attention", "feedforward": "feed-forward"}


def profile_part(request: Request) -> Part:
    """Measure forward and backward passes by kind over lengths and batches, and by layer at the largest."""
    model, context = request.model, request.model.config.context
    lengths = request.lengths or tuple(n for n in DEFAULT_LENGTHS if context is None or n <= context) or (context or 1,)
    rows = list(profile_sweep(model, lengths, request.batches))
    (largest,) = profile_sweep(model, lengths[-1:], request.batches[-1:], by="layer")
    section = Section(
        "Profile",
        f"Time of forward and backward passes over random tokens on {model.device}, and the bytes that the forward "
        "pass saves for the backward pass. Of three passes the fastest counts; a share is that of both passes, and "
        "rest is the time outside of all parts. On a GPU, the time of launching kernels does not count.",
    )
    table = [entry for row in rows for entry in _entries(row)]
    section.tables.append(metrics_table(table))
    for batch in request.batches:
        chosen = [row for row in rows if row.batch == batch]
        curves = {
            f"{name}, {direction}": [1000 * getattr(row.costs[kind], field) for row in chosen]
            for direction, field in (("forward pass", "seconds"), ("backward pass", "backward_seconds"))
            for kind, name in KINDS.items()
        }
        title = f"attention and feed-forward by length, batch {batch}"
        figure = draw_curves(title, "length in tokens", "milliseconds", lengths, curves, logarithmic=True)
        section.figures.append((figure, title))
    times = {name: 1000 * (cost.seconds + cost.backward_seconds) for name, cost in _parts(largest)}
    title = f"milliseconds by layer, batch {largest.batch}, {largest.length} tokens"
    section.figures.append((draw_bars(title, "milliseconds, forward and backward", times), title))
    return Part(section, {"by_kind": table, "by_layer": _entries(largest)})


def _parts(row: ProfileRow) -> list[tuple[str, Any]]:
    return [(name, cost) for name, cost in row.costs.items() if name != "total"]


def _entries(row: ProfileRow) -> list[dict[str, Any]]:
    total = row.costs["total"].seconds + row.costs["total"].backward_seconds
    return [
        {
            "length": row.length,
            "batch": row.batch,
            "part": name,
            "forward_ms": round(1000 * cost.seconds, 3),
            "backward_ms": round(1000 * cost.backward_seconds, 3),
            "share": round((cost.seconds + cost.backward_seconds) / total, 4),
            "saved_bytes": cost.kept_bytes,
        }
        for name, cost in row.costs.items()
    ]


def probes_part(request: Request) -> Part:
    """Train a linear probe on every layer, for the labels of a corpus."""
    if request.labelled_data is None:
        raise InputError("probes need labelled data; give a corpus with --probe")
    texts, unit = _labelled_texts(request)
    report = probe_layers(request.model, texts)
    rows = [
        {
            "layer": layer.name,
            "accuracy": round(layer.accuracy, 4),
            "control": round(layer.control_accuracy, 4),
            "selectivity": round(layer.selectivity, 4),
        }
        for layer in report.layers
    ]
    best = report.best
    section = Section(
        "Probes by layer",
        f"A linear classifier reads the labels of {unit} in {request.labelled_data} from the residual stream: best "
        f"after {best.name} ({best.accuracy:.1%}; always the most frequent label: {report.majority:.1%}). Trained on "
        f"{report.num_train:,} {unit}, tested on {report.num_test:,}. In the control task every distinct "
        f"{unit.removesuffix('s')} has a random label (Hewitt and Liang 2019); selectivity is the accuracy minus "
        "that of the control task.",
    )
    section.tables.append(metrics_table(rows))
    curves = {
        "accuracy": [layer.accuracy for layer in report.layers],
        "control task": [layer.control_accuracy for layer in report.layers],
        "selectivity": [layer.selectivity for layer in report.layers],
    }
    names = [layer.name.removeprefix("layer ") for layer in report.layers]
    level = ("most frequent label", report.majority)
    figure = draw_curves(
        f"linear probes: {unit} of {request.labelled_data}", "after layer", "", names, curves, level=level
    )
    section.figures.append((figure, "accuracy of probes by layer"))
    data = {"majority": report.majority, "num_train": report.num_train, "num_test": report.num_test, "layers": rows}
    return Part(section, data)


def _labelled_texts(request: Request) -> tuple[list[LabelledText], str]:
    """Encode the first rows of a corpus of tagged sentences or labelled texts; return them and what is labelled."""
    name, loaded = str(request.labelled_data), request.pipe.loaded
    kind = None if name in CORPORA else infer_corpus_kind(name, ("tagged", "labelled"), folder=request.data_folder)
    corpus = load_corpus(name, "train", folder=request.data_folder, kind=kind)
    labels = {label: number for number, label in enumerate(corpus.labels())}
    template, rows = loaded.input_template(request.model.config.context), corpus.rows[: request.limit]
    if corpus.kind == "tagged":
        encoder = WordEncoder(loaded.tokenizer, template)
        texts = []
        for row in rows:
            encoded = encoder(row.words)
            count = len(encoded.word_positions)
            sizes = [len(encoder.encode_word(word)) for word in row.words[:count]]
            positions = [range(start, start + size) for start, size in zip(encoded.word_positions, sizes, strict=True)]
            numbers = [labels[label] for label in row.labels[:count]]
            texts.append(LabelledText(encoded.ids, positions, numbers, [word.lower() for word in row.words[:count]]))
        return texts, "words"
    if corpus.kind == "labelled":
        encoded_rows = [template(loaded.tokenizer.encode(row.text)) for row in rows]
        return [
            LabelledText(encoded.ids, [range(len(encoded.ids))], [labels[row.label]], [row.text])
            for encoded, row in zip(encoded_rows, rows, strict=True)
        ], "texts"
    raise InputError(f"{name} is {corpus.kind}; probes need labelled texts or tagged words")
