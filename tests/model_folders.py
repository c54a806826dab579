"""Small model folders for tests: two runs of ours, and two written by transformers."""

import json
from pathlib import Path

import torch

import monoblock as mb
from monoblock.cli.main import run

TEXT = "".join(f"And the {n} sons of the king went up to the house of the LORD. Blessed é 🤖.\n" for n in range(60))
PAIRS = "".join(f"the {n} sons\tdie {n} Söhne\n" for n in range(90))
MODEL_SECTION = '[model]\nfamily = "{}"\nwidth = 16\ndepth = 1\nheads = 2\ncontext = 48\n'
TRAIN_SECTION = '[train]\nobjective = "{}"\nsteps = {}\nbatch = 5\neval_every = 0\ndevice = "cpu"\ncompile = "no"\n'
CAUSAL_RECIPE = (
    '[data]\ncorpus = "{}"\n[tokenizer]\nkind = "bpe"\nvocab = 290\n'
    + MODEL_SECTION.format("gpt")
    + TRAIN_SECTION.format("causal_lm", 3)
)
SEQ2SEQ_RECIPE = (
    '[data]\ncorpus = "{}"\n[tokenizer]\nkind = "bpe"\nvocab = 270\n'
    + MODEL_SECTION.format("vaswani")
    + TRAIN_SECTION.format("seq2seq", 3)
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def train_folder(parent: Path, name: str, recipe: str, text: str) -> Path:
    """Train a run folder with the command line."""
    corpus = parent / ("book.txt" if name == "causal" else "pairs.tsv")
    corpus.write_text(text, encoding="utf-8")
    (parent / f"{name}.toml").write_text(recipe.format(corpus), encoding="utf-8")
    assert run(["train", str(parent / f"{name}.toml"), "--out", str(parent / name)]) == 0
    torch.use_deterministic_algorithms(False)
    return parent / name


def causal_folder(parent: Path) -> Path:
    return train_folder(parent, "causal", CAUSAL_RECIPE, TEXT)


def seq2seq_folder(parent: Path) -> Path:
    return train_folder(parent, "both", SEQ2SEQ_RECIPE, PAIRS)


def hf_folder(parent: Path, kind: str) -> Path:
    """Write a GPT-2 or T5 with random weights by transformers, and a tokenizer with a chat template."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = mb.Tokenizer.train("bpe", [TEXT], 290)
    tokenizer.chat_template = CHAT_TEMPLATE
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
    folder = parent / kind
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit_json(folder: Path, name: str, change) -> None:
    """Change a JSON file of a folder in place."""
    data = json.loads((folder / name).read_text(encoding="utf-8"))
    change(data)
    (folder / name).write_text(json.dumps(data), encoding="utf-8")
