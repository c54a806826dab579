"""`monoblock inspect MODEL TEXT`: draw attention, the logit lens, norms, positions and parameters of a model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monoblock.cli.model_options import ModelVerb, interpolate_option
from monoblock.cli.output import echo, print_json, print_table, suggest_next
from monoblock.cli.verb import argument, data_folder_option, option, resolve_data_folder
from monoblock.errors import ConfigError, FileError, did_you_mean

if TYPE_CHECKING:
    from monoblock.runs.inspect import Part, Request

WITH_TEXT = ("attention", "heads", "lens", "norms")
WITHOUT_TEXT = ("scores", "positions", "masks", "parameters", "coreference", "profile", "probes")
PART_NAMES = (*WITH_TEXT, *WITHOUT_TEXT)
DEFAULT_TEXT = "The animal didn't cross the street because it was too tired."
SHOWN_ROWS = 24  # of a table; the page and --json have all
HTML_SUFFIXES = (".html", ".htm")


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelVerb):
    """Draw what MODEL does with TEXT: attention of every head, which heads are local, the logit lens, norms and
    gradients by depth, positions, masks and parameters. An HTML page has everything; a PNG, SVG or PDF file has the
    pictures of one part. For a vision model, TEXT is the path of an image.

    \b
    attention:    the weights of every head, or of one: --layer 3 --head 0
    heads:        entropy, distance and shares of every head: local or global
    lens:         what the model would predict after each layer
    norms:        of the residual stream and of the gradient, by depth
    scores:       induction, duplicate-, previous-, positional and rare-token heads
    positions:    the position encoding: vectors, hands, similarity by distance
    masks:        which tokens a token may attend to
    parameters:   by component
    coreference:  the head that resolves pronouns best, in English (encoders)
    profile:      time of forward and backward passes: --lengths, --batches
    probes:       what a linear classifier reads from each layer: --probe DATA
    """

    text: str | None = argument(None)
    target: str | None = option("Encoder-decoder: the target text.  [default: what the model generates]")
    show: tuple[str, ...] = option(
        "Show this part only; may be repeated.  [default: all that apply to MODEL, except coreference, profile and "
        "probes; attention for a PNG, SVG or PDF file]",
        (),
        metavar="PART",
    )
    layer: str | None = option("Attention of this layer only: a number, or a name such as decoder.3.cross.")
    head: int | None = option("Attention of this head of --layer, with its tokens.", least=0)
    lengths: str | None = option("Profile: lengths in tokens.  [default: 32,64,128,256]", metavar="N,N,…")
    batches: str | None = option("Profile: batch sizes.  [default: 1]", metavar="N,N,…")
    probe: str | None = option("Probes: a corpus or file of labelled texts or tagged words.", metavar="DATA")
    limit: int = option("Probes: use N texts.", 300, least=4)
    folder: Path | None = data_folder_option()
    out: Path | None = option(
        "HTML, PNG, SVG or PDF file to write.  [default: inspect.html; with --json, none]", path="file"
    )
    interpolate: int | None = interpolate_option()
    dtype: str | None = option("Weights in fp32, bf16 or fp16.", "fp32")

    def run(self) -> None:
        from monoblock.plots.figure import check_plot_path

        names = self._check_parts()
        sweep = {
            "lengths": _parse_numbers("--lengths", self.lengths),
            "batches": _parse_numbers("--batches", self.batches) or (1,),
        }
        out = Path("inspect.html") if self.out is None and not self.as_json else self.out
        is_page = out is not None and out.suffix.lower() in HTML_SUFFIXES
        if out is not None:
            # A page has pictures inside, which are PNG.
            check_plot_path(out.with_suffix(".png") if is_page else out, formats=".html, .png, .svg or .pdf")
        pipe = self.load(interpolate=self.interpolate)
        from monoblock.runs.inspect import PARTS, Request, default_parts, encode_input, transformer_of

        if pipe.tokenizer is None and self.text is None:
            raise ConfigError("this model reads images; give the path of an image as TEXT")
        request = Request(
            pipe,
            encode_input(pipe, DEFAULT_TEXT if self.text is None else self.text, self.target),
            self.layer,
            self.head,
            has_text=self.text is not None,
            labelled_data=self.probe,
            data_folder=resolve_data_folder(self.folder),
            limit=self.limit,
            **sweep,
        )
        if not names:
            every = default_parts(transformer_of(pipe))
            names = every if is_page or (out is None and self.layer is None and self.head is None) else ["attention"]
        names.sort(key=lambda name: name != "probes")  # first, since a wrong corpus should be refused at once
        parts = {name: PARTS[name](request) for name in names}
        saved = [] if out is None else _save(request, self.model, parts, out, is_page)
        if self.as_json:
            tokens = {"tokens": request.input.tokens} if request.has_text else {}
            print_json({"model": self.model} | tokens | {name: part.data for name, part in parts.items()})
        else:
            _print_report(parts)
            for path in saved:
                echo(f"Saved {path}")
        model = shlex.quote(self.model)
        suggest_next(
            f"prune {model} DATA --keep 0.5 --out DIR" if is_page else f"inspect {model} TEXT --out inspect.html"
        )

    def _check_parts(self) -> list[str]:
        """Return the names of the parts to show, and raise ConfigError for options that do not fit them."""
        words = [*self.show, *(["probes"] if self.probe is not None else [])]
        names = list(dict.fromkeys(name for word in words for name in word.split(",")))
        for name in names:
            if name not in PART_NAMES:
                raise ConfigError(f"there is no part {name!r} to show{did_you_mean(name, PART_NAMES)}; see --help")
        if self.head is not None and self.layer is None:
            raise ConfigError("--head needs --layer, as in --layer 3 --head 0")
        if names and self.text is None and not set(names) <= set(WITHOUT_TEXT):
            raise ConfigError("TEXT is missing; give a text to inspect, such as 'The cat sat on the mat.'")
        if not names and self.text is None:
            raise ConfigError("TEXT is missing; give a text to inspect, or a part that needs none: --show positions")
        if self.layer is not None and names and "attention" not in names:
            raise ConfigError("--layer and --head are for --show attention; leave them out")
        if "probes" in names and self.probe is None:
            raise ConfigError("probes need labelled data; write --probe DATA, a corpus or a file")
        if (self.lengths or self.batches) is not None and "profile" not in names:
            raise ConfigError("--lengths and --batches are for --show profile; leave them out")
        return names


def _parse_numbers(option: str, text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} {text} is not a list of numbers; write {option} 64,256")
    return tuple(sorted({int(word) for word in words}))


def _save(request: Request, model: str, parts: dict[str, Part], out: Path, is_page: bool) -> list[Path]:
    """Write an HTML page, or the figures of the parts; the second figure and those after it are numbered."""
    from monoblock.plots.figure import save_figure
    from monoblock.plots.page import save_page

    if is_page:
        maps = [one for part in parts.values() for one in part.maps]
        subtitle = _describe_input(request) if request.has_text else request.model.config.family
        return [save_page(out, f"Inside {model}", subtitle, [part.section for part in parts.values()], maps)]
    figures = [figure for part in parts.values() for figure, _ in part.section.figures]
    if not figures:
        raise FileError(f"{', '.join(parts)} has a table, but no picture; write an .html file, or leave --out out")
    paths = [out, *(out.with_stem(f"{out.stem}-{number}") for number in range(2, len(figures) + 1))]
    return [save_figure(figure, path) for figure, path in zip(figures, paths, strict=True)]


def _describe_input(request: Request) -> str:
    sides = {"source": request.input.source_tokens, "target": request.input.target_tokens}
    texts = {name: f"{len(tokens)} tokens: {' '.join(tokens)[:300]}" for name, tokens in sides.items() if tokens}
    described = "; ".join(f"{name}, {text}" for name, text in texts.items()) if len(texts) > 1 else texts["source"]
    if request.input.pixels is not None:
        described = f"{texts['source']}; a patch is named by its row and its column"
    return f"{request.model.config.family}; {described}"


def _print_report(parts: dict[str, Part]) -> None:
    """Print the text and the tables of the parts that have tables."""
    for part in parts.values():
        for columns, rows in part.section.tables:
            echo(f"\n{part.section.title}\n{part.section.text}\n")
            more = [["…", *[None] * (len(columns) - 1)]] if len(rows) > SHOWN_ROWS else []
            print_table(columns, [*rows[:SHOWN_ROWS], *more])
    if parts:
        echo()
