"""The command `monoblock`: run a verb, and turn every error into one line and an exit code.

Exit codes: 0 success, 1 failure, 2 usage error, 3 failed check (such as `evaluate --at-least`), 130 interrupted by
Ctrl-C, 143 ended by SIGTERM.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

import click

from monoblock import __version__
from monoblock.cli.output import echo
from monoblock.errors import ConfigError, MonoblockError, did_you_mean, shorten_message

# Verb -> the module of cli/ that has it, and its line in --help. The verb `prune` is the class Prune of its module, and
# the module is imported when the verb is used; a verb with commands, such as `tokenizer train`, has a row in COMMANDS.
VERBS = {
    "demo": ("demo", "Train a small GPT, sample from it, count its parameters and examine it."),
    "ls": ("ls", "List recipes, tasks, keys, presets, knobs, corpora, experiments and runs."),
    "tokenizer": ("data", "Train a tokenizer, or show how one splits a text."),
    "data": ("data", "Prepare token shards from any amount of text, or show them."),
    "train": ("training", "Train the model that a recipe describes."),
    "finetune": ("training", "Fine-tune a model on other data: all weights, some layers, or LoRA."),
    "generate": ("text", "Generate text that continues a prompt."),
    "chat": ("text", "Chat with a model that has a chat template."),
    "translate": ("text", "Translate or transliterate lines of text."),
    "predict": ("predict", "Classify, tag, fill masks, answer questions or embed texts."),
    "evaluate": ("evaluate", "Compute perplexity, BLEU, accuracy, … of a model on a corpus."),
    "backtranslate": ("text", "Make synthetic training pairs from target sentences."),
    "compare": ("compare", "Run an experiment: train variants of a model and compare them."),
    "bench": ("machine", "Measure speed and memory, and compare with other libraries."),
    "convert": ("models", "Convert a model between monoblock, Hugging Face and GGUF, and compare the logits."),
    "inspect": ("inspect", "Draw attention, logit lens, norms and positions of a model on a text."),
    "prune": ("models", "Remove the attention heads that matter least on a corpus."),
    "quantize": ("models", "Quantize a model to 8 or 4 bits, and compare its perplexity."),
    "account": ("account", "Count the parameters, FLOPs and memory of a model without building it."),
    "draw": ("models", "Draw the architecture of a model, with shapes and parameters, as SVG."),
    "serve": ("serving", "Serve models to clients of OpenAI's API."),
    "batch": ("serving", "Answer a file of requests in OpenAI's batch format."),
    "replay": ("serving", "Derive a served answer again from its receipt, and compare."),
    "doctor": ("doctor", "Examine a model or a run: leaks, padding, cache, positions, training."),
    "env": ("machine", "Show installed versions, devices, and the default device and dtype."),
}


class VerbGroup(click.Group):
    """A click group that imports the module of a verb only when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        from monoblock.cli.verb import build_command, build_group

        file, about = VERBS[name]
        module = import_module(f"monoblock.cli.{file}")
        if name in getattr(module, "COMMANDS", {}):
            return build_group(name, module.COMMANDS[name], about)
        return build_command(name, getattr(module, name.capitalize()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            raise click.UsageError(f"there is no verb {args[0]!r}{did_you_mean(args[0], VERBS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, about) for name, (_, about) in VERBS.items()])


@click.group(
    cls=VerbGroup,
    subcommand_metavar="VERB [WHAT] [key=value …]",
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="monoblock", message="%(prog)s %(version)s")
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error; also accepted after the verb."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """The Transformer, complete and usable.

    `monoblock VERB --help` shows the arguments and options of a verb. MODEL is a run folder (such as runs/demo-1),
    a Hugging Face folder, a GGUF file, or the owner/name[@revision] of a model on the Hugging Face Hub.
    """
    if ctx.invoked_subcommand is None:
        echo(ctx.get_help())


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `argv` does not include the name of the program."""
    if "OMP_WAIT_POLICY" not in os.environ:  # before torch is imported: threads that wait leave busy cores to others
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    words, debug = _extract_debug(list(sys.argv[1:] if argv is None else argv))
    warnings.showwarning = _print_warning
    try:
        result = cli.main(words, prog_name="monoblock", standalone_mode=False, obj={"debug": debug, "words": words})
        sys.stdout.flush()  # raises BrokenPipeError here, where it is handled, and not while Python shuts down
    except BrokenPipeError:
        return _handle_closed_pipe()
    except KeyboardInterrupt:
        return _print_error("interrupted", 130)
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        return _print_error(*_describe_error(error))
    return result if isinstance(result, int) else 0


def _extract_debug(words: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without --debug, which may be anywhere before a bare `--`, and whether it was given."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return kept + words[end:], len(kept) < end


def _describe_error(error: Exception) -> tuple[str, int]:
    """Return the line to print for an error, and the exit code."""
    match error:
        case click.Abort(__cause__=EOFError()):  # click also raises Abort when the input ends
            return "unexpected end of input (use --debug for details)", 1
        case click.Abort():
            return "interrupted", 130
        case click.UsageError(ctx=ctx):
            command = ctx.command_path if ctx else "monoblock"
            return f"{error.format_message().rstrip('.')} (see {command} --help)", 2
        case click.ClickException():
            return error.format_message(), error.exit_code
        case ConfigError():  # from the command line or a recipe
            return str(error), 2
        case MonoblockError():
            return str(error), 1
        case OSError(strerror=str(reason), filename=str(name)):
            return f"{name}: {reason}", 1
        case _:
            return f"{type(error).__name__}: {error} (use --debug for details)", 1


def _print_error(line: str, code: int) -> int:
    echo(f"error: {shorten_message(' '.join(line.split()))}", err=True)
    return code


def _print_warning(message: Warning | str, category: type[Warning], *place: object, **more: object) -> None:
    """Print a warning as one line, without the code it was raised in."""
    echo(f"warning: {' '.join(str(message).split())}", err=True)


def _handle_closed_pipe() -> int:
    """Return exit code 1 and print nothing, after the reader of stdout closed the pipe (`monoblock ls | head -1`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
