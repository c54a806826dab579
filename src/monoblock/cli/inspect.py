"""`monoblock inspect MODEL TEXT`: draw attention, the logit lens, norms, positions and parameters of a model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.data_options import FOLDER_HELP, folder_type, resolve_data_folder
from monoblock.cli._shared.image_options import interpolate_option, set_image_size
from monoblock.cli._shared.model_options import device_option, force_option, load_pipeline
from monoblock.cli._shared.output import echo, json_option, print_json, print_table, suggest_next
from monoblock.errors import ConfigError, FileError, did_you_mean

if TYPE_CHECKING:
    from monoblock.runs.inspect.part import Part, Request

WITH_TEXT = ("attention", "heads", "lens", "norms")
WITHOUT_TEXT = ("scores", "positions", "masks", "parameters", "coreference", "profile", "probes")
PART_NAMES = (*WITH_TEXT, *WITHOUT_TEXT)
DEFAULT_TEXT = "The animal didn't cross the street because it was too tired."
HTML_SUFFIXES = (".html", ".htm")


@click.command(
    name="inspect",
    help="Draw what MODEL does with TEXT: attention of every head, which heads are local, the logit lens, norms and "
    "gradients by depth, positions, masks and parameters. An HTML page has everything; a PNG, SVG or PDF file has "
    "the pictures of one part. For a vision model, TEXT is the path of an image.\n\n"
    "\b\n"
    "attention:    the weights of every head, or of one: --layer 3 --head 0\n"
    "heads:        entropy, distance and shares of every head: local or global\n"
    "lens:         what the model would predict after each layer\n"
    "norms:        of the residual stream and of the gradient, by depth\n"
    "scores:       induction, duplicate-, previous-, positional and rare-token heads\n"
    "positions:    the position encoding: vectors, hands, similarity by distance\n"
    "masks:        which tokens a token may attend to\n"
    "parameters:   by component\n"
    "coreference:  the head that resolves pronouns best, in English (encoders)\n"
    "profile:      time of forward and backward passes: --lengths, --batches\n"
    "probes:       what a linear classifier reads from each layer: --probe DATA",
)
@click.argument("model")
@click.argument("text", required=False)
@click.option("--target", help="Encoder-decoder: the target text.  [default: what the model generates]")
@click.option(
    "--show",
    multiple=True,
    metavar="PART",
    help="Show this part only; may be repeated.  [default: all that apply to MODEL, except coreference, profile and "
    "probes; attention for a PNG, SVG or PDF file]",
)
@click.option("--layer", help="Attention of this layer only: a number, or a name such as decoder.3.cross.")
@click.option("--head", type=click.IntRange(min=0), help="Attention of this head of --layer, with its tokens.")
@click.option("--lengths", metavar="N,N,…", help="Profile: lengths in tokens.  [default: 32,64,128,256]")
@click.option("--batches", metavar="N,N,…", help="Profile: batch sizes.  [default: 1]")
@click.option("--probe", metavar="DATA", help="Probes: a corpus or file of labelled texts or tagged words.")
@click.option("--limit", type=click.IntRange(min=4), default=300, show_default=True, help="Probes: use N texts.")
@click.option("--data", "folder", type=folder_type, help=FOLDER_HELP)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="HTML, PNG, SVG or PDF file to write.  [default: inspect.html; with --json, none]",
)
@interpolate_option
@device_option
@click.option("--dtype", default="fp32", show_default=True, help="Weights in fp32, bf16 or fp16.")
@force_option
@json_option
def command(
    model: str,
    text: str | None,
    target: str | None,
    show: tuple[str, ...],
    layer: str | None,
    head: int | None,
    lengths: str | None,
    batches: str | None,
    probe: str | None,
    limit: int,
    folder: Path | None,
    out: Path | None,
    interpolate: int | None,
    device: str | None,
    dtype: str,
    force: bool,
    as_json: bool,
) -> None:
    show += ("probes",) if probe is not None and "probes" not in show else ()
    names = _check_parts(show, layer, head, text)
    if "probes" in names and probe is None:
        raise ConfigError("probes need labelled data; write --probe DATA, a corpus or a file")
    if (lengths or batches) is not None and "profile" not in names:
        raise ConfigError("--lengths and --batches are for --show profile; leave them out")
    sweep = {"lengths": _parse_numbers("--lengths", lengths), "batches": _parse_numbers("--batches", batches) or (1,)}
    out = Path("inspect.html") if out is None and not as_json else out
    is_page = out is not None and out.suffix.lower() in HTML_SUFFIXES
    if out is not None:
        _check_out(out, is_page)
    pipe = set_image_size(load_pipeline(model, device, dtype, force=force), interpolate)
    from monoblock.runs.inspect.inputs import encode_input, transformer_of
    from monoblock.runs.inspect.part import Request
    from monoblock.runs.inspect.parts import PARTS, default_parts

    if pipe.tokenizer is None and text is None:
        raise ConfigError("this model reads images; give the path of an image as TEXT")
    request = Request(
        pipe,
        encode_input(pipe, DEFAULT_TEXT if text is None else text, target),
        layer,
        head,
        has_text=text is not None,
        labelled_data=probe,
        data_folder=resolve_data_folder(folder),
        limit=limit,
        **sweep,
    )
    if not names:
        every = default_parts(transformer_of(pipe))
        names = every if is_page or (out is None and layer is None and head is None) else ["attention"]
    names.sort(key=lambda name: name != "probes")  # first, since a wrong corpus should be refused at once
    parts = {name: PARTS[name](request) for name in names}
    saved = [] if out is None else _save(request, model, parts, out, is_page)
    if as_json:
        tokens = {"tokens": request.input.tokens} if request.has_text else {}
        print_json({"model": model} | tokens | {name: part.data for name, part in parts.items()})
    else:
        _print_report(parts)
        for path in saved:
            echo(f"Saved {path}")
    quoted = shlex.quote(model)
    suggest_next(
        f"prune {quoted} DATA --keep 0.5 --out DIR" if is_page else f"inspect {quoted} TEXT --out inspect.html"
    )


def _check_parts(show: tuple[str, ...], layer: str | None, head: int | None, text: str | None) -> list[str]:
    names = list(dict.fromkeys(name for word in show for name in word.split(",")))
    for name in names:
        if name not in PART_NAMES:
            raise ConfigError(f"there is no part {name!r} to show{did_you_mean(name, PART_NAMES)}; see --help")
    if head is not None and layer is None:
        raise ConfigError("--head needs --layer, as in --layer 3 --head 0")
    if names and text is None and not set(names) <= set(WITHOUT_TEXT):
        raise ConfigError("TEXT is missing; give a text to inspect, such as 'The cat sat on the mat.'")
    if not names and text is None:
        raise ConfigError("TEXT is missing; give a text to inspect, or a part that needs none: --show positions")
    if layer is not None and names and "attention" not in names:
        raise ConfigError("--layer and --head are for --show attention; leave them out")
    return names


def _parse_numbers(option: str, text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} {text} is not a list of numbers; write {option} 64,256")
    return tuple(sorted({int(word) for word in words}))


def _check_out(out: Path, is_page: bool) -> None:
    from monoblock.plots.figure import check_plot_path

    if not is_page:
        check_plot_path(out, formats=".html, .png, .svg or .pdf")
    else:
        check_plot_path(out.with_suffix(".png"))  # the pictures inside the page


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
    if request.input.pixels is not None:
        return f"{request.model.config.family}; {texts['source']}; a patch is named by its row and its column"
    described = "; ".join(f"{name}, {text}" for name, text in texts.items()) if len(texts) > 1 else texts["source"]
    return f"{request.model.config.family}; {described}"


def _print_report(parts: dict[str, Part]) -> None:
    """Print the text and the tables of the parts that have tables."""
    for part in parts.values():
        for columns, rows in part.section.tables:
            echo(f"\n{part.section.title}\n{part.section.text}\n")
            print_table(columns, _important(columns, rows))
    if parts:
        echo()


def _important(columns: Any, rows: Any, limit: int = 24) -> Any:
    """Return the rows of a table, of many only the first; the page and --json have all."""
    if len(rows) <= limit:
        return rows
    return [*rows[:limit], ["…" if index == 0 else None for index in range(len(columns))]]
