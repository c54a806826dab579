"""Small model folders for tests of what reads them: two runs of ours, and two as transformers writes them."""

import json
from pathlib import Path

import torch

import monoblock as mb
from monoblock.cli.main import run

BOOK = "".join(f"And the {n} sons of the king went up to the house of the LORD. Blessed é 🤖.\n" for n in range(60))
PAIRS = "".join(f"the {n} sons\tdie {n} Söhne\n" for n in range(90))
MODEL = '[model]\nfamily = "{}"\nwidth = 16\ndepth = 1\nheads = 2\ncontext = 48\n'
TRAIN = '[train]\nobjective = "{}"\nsteps = {}\nbatch = 5\neval_every = 0\ndevice = "cpu"\ncompile = "no"\n'
CAUSAL = (
    '[data]\ncorpus = "{}"\n[tokenizer]\nkind = "bpe"\nvocab = 290\n' + MODEL.format("gpt") + TRAIN.format("causal", 3)
)
BOTH = (
    '[data]\ncorpus = "{}"\n[tokenizer]\nkind = "bpe"\nvocab = 270\n'
    + MODEL.format("vaswani")
    + TRAIN.format("pairs", 3)
)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def trained(place: Path, name: str, recipe: str, text: str) -> Path:
    """A run folder, made by the command line."""
    corpus = place / ("book.txt" if name == "causal" else "pairs.tsv")
    corpus.write_text(text, encoding="utf-8")
    (place / f"{name}.toml").write_text(recipe.format(corpus), encoding="utf-8")
    assert run(["train", str(place / f"{name}.toml"), "--out", str(place / name)]) == 0
    torch.use_deterministic_algorithms(False)
    return place / name


def causal(place: Path) -> Path:
    return trained(place, "causal", CAUSAL, BOOK)


def both(place: Path) -> Path:
    return trained(place, "both", BOTH, PAIRS)


def published(place: Path, kind: str) -> Path:
    """A folder as transformers writes it, GPT-2 or T5 with random weights, and a tokenizer with a chat template."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = mb.Tokenizer.train("bpe", [BOOK], 290)
    tokenizer.chat_template = TEMPLATE
    ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, "bos_token_id": tokenizer.bos_id}
    torch.manual_seed(3)
    if kind == "gpt2":
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 128}
        config = transformers.GPT2Config(vocab_size=tokenizer.vocab_size, **sizes, **ids)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"d_model": 24, "num_layers": 1, "num_heads": 2, "d_kv": 12, "d_ff": 32}
        start = {"decoder_start_token_id": tokenizer.pad_id}
        config = transformers.T5Config(vocab_size=tokenizer.vocab_size, **sizes, **ids, **start)
        model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    folder = place / kind
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rewrite(folder: Path, name: str, change) -> None:
    """Change a JSON file of a folder."""
    data = json.loads((folder / name).read_text(encoding="utf-8"))
    change(data)
    (folder / name).write_text(json.dumps(data), encoding="utf-8")
