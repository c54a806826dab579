"""The command `monoblock`: finds the verb, runs it, and turns whatever goes wrong into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 usage, 3 a check failed (a verb says so by `ctx.exit(3)`), 130 interrupted.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from monoblock import __version__
from monoblock.errors import ConfigError, MonoblockError, did_you_mean

# Verb -> (the module whose `command` it is, its line in --help). The lines stand here, not in the modules,
# so that --help imports none of them.
VERBS = {
    "demo": ("monoblock.cli.demo", "Train a small GPT, sample from it, account for it."),
    "ls": ("monoblock.cli.ls", "List what there is to work with: recipes, presets, corpora, runs."),
    "tokenizer": ("monoblock.cli.tokenizer", "Train a tokenizer; show how one cuts text."),
    "train": ("monoblock.cli.train", "Train a model by a recipe."),
    "finetune": ("monoblock.cli.finetune", "Go on from the weights of a model, all of them or LoRA, on other data."),
    "generate": ("monoblock.cli.generate", "Continue a text, shown as it comes."),
    "chat": ("monoblock.cli.chat", "Talk with a model that has a chat template."),
    "translate": ("monoblock.cli.translate", "Translate or transliterate: a line in, a line out."),
    "predict": ("monoblock.cli.predict", "Classify, label, fill in or embed texts, by the model's head."),
    "evaluate": ("monoblock.cli.evaluate", "Loss, BLEU, accuracy … of a model on a corpus, by its task."),
    "backtranslate": ("monoblock.cli.backtranslate", "Make sources for target sentences, to train on."),
    "compare": ("monoblock.cli.compare", "Train the arms of an experiment and print their table."),
    "bench": ("monoblock.cli.bench", "Tokens per second and memory, beside the peers that are installed."),
    "convert": ("monoblock.cli.convert", "Between our folder, Hugging Face and GGUF, with a parity certificate."),
    "quantize": ("monoblock.cli.quantize", "Store a model's matrices in 8 or 4 bits, and say what that costs."),
    "account": ("monoblock.cli.account", "Parameters, FLOPs and memory of a model that need not be built."),
    "env": ("monoblock.cli.env", "Versions, devices, what would be chosen and why."),
}


class Verbs(click.Group):
    """A group that imports a verb's module only when that verb is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = import_module(VERBS[name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            raise click.UsageError(f"no verb {args[0]!r}{did_you_mean(args[0], VERBS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(
    cls=Verbs,
    subcommand_metavar="VERB [WHAT] [key=value …]",
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="monoblock", message="%(prog)s %(version)s")
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error; allowed after the verb as well."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """The Transformer, complete and usable."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `argv` is without the program's name."""
    words, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    try:
        result = cli.main(words, prog_name="monoblock", standalone_mode=False)
        sys.stdout.flush()  # a closed pipe shows here, where it can be answered, and not while Python shuts down
    except BrokenPipeError:
        return _hang_up()
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        return _fail(*_explain(error))
    return result if isinstance(result, int) else 0


def _take_debug(words: list[str]) -> tuple[list[str], bool]:
    """Take --debug from wherever it stands before a bare `--`, because the user adds it at the end of a failed line."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return kept + words[end:], len(kept) < end


def _explain(error: Exception) -> tuple[str, int]:
    """The line to print for an error, and the exit code."""
    match error:
        case click.Abort(__cause__=EOFError()):  # click takes this for an interruption too
            return "the input ended before it was complete (--debug shows where)", 1
        case click.Abort():
            return "interrupted", 130
        case click.UsageError(ctx=ctx):
            where = ctx.command_path if ctx else "monoblock"
            return f"{error.format_message().rstrip('.')} (see {where} --help)", 2
        case click.ClickException():
            return error.format_message(), error.exit_code
        case ConfigError():  # typed by the user, on the command line or in a recipe
            return str(error), 2
        case MonoblockError():
            return str(error), 1
        case OSError(strerror=str(reason), filename=str(name)):
            return f"{name}: {reason}", 1
        case _:
            return f"{type(error).__name__}: {error} (--debug shows where)", 1


def _fail(line: str, code: int) -> int:
    click.echo(f"error: {' '.join(line.split())}", err=True)
    return code


def _hang_up() -> int:
    """Whoever read our output has left (`monoblock ls | head -1`): be quiet, also when Python flushes at its end."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
