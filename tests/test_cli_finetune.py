"""`monoblock finetune`: the objective follows from data and model, the recipe says everything, errors are one line."""

import json
import tomllib

import pytest
import torch
from training_support import command, digest, train, write_corpora, write_recipe

import monoblock as mb
from monoblock.tokenizers.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {"width": 24, "depth": 2, "heads": 4, "hidden": 37, "context": 61}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data of every kind, an encoder and a decoder that talks."""
    folder = tmp_path_factory.mktemp("finetune")
    write_corpora(folder)
    rows = (folder / "text.txt").read_text().split(".\n")[:60]
    (folder / "labelled.tsv").write_text("".join(f"{'ab'[n % 2]}\t{row}\n" for n, row in enumerate(rows)))
    (folder / "tagged.conll").write_text(
        "".join("".join(f"{w} {len(w)}\n" for w in row.split()) + "\n" for row in rows)
    )
    (folder / "strange.tsv").write_text(
        "".join(f"{'c' if n == 56 else 'ab'[n % 2]}\t{row}\n" for n, row in enumerate(rows))
    )
    (folder / "strange.conll").write_text("".join(f"up {'c' if n == 55 else 'ab'[n % 2]}\n\n" for n in range(60)))
    talk = [{"messages": [{"role": "user", "content": r}, {"role": "assistant", "content": r[:9]}]} for r in rows]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))
    masked = {"family": "bert", "head": "masked_lm", **SMALL}
    changes = {
        "model": masked,
        "tokenizer": {"kind": "bpe", "vocab": 300},
        "train": {"objective": "masked", "steps": 2},
    }
    train(write_recipe(folder, changes), folder / "encoder")
    words = ["<|im_start|>", "<|im_end|>", "eos", "pad"]
    tokenizer = Tokenizer.train("bpe", rows, 300, specials=words)
    data, named = tokenizer.content()
    Tokenizer.from_parts(data, {**named, "chat_template": CHATML}, "here").save_pretrained(folder / "decoder")
    torch.manual_seed(5)
    mb.export_hf(mb.Transformer(mb.llama(vocab=300, tie="none", **SMALL)), folder / "decoder")
    return folder


def told(capsys, *words):
    """The recipe of a dry run."""
    assert command("finetune", *words, "--dry-run") == 0
    return tomllib.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("model", "data", "objective"),
    [
        ("encoder", "labelled.tsv", "classify"),
        ("encoder", "tagged.conll", "label"),
        ("encoder", "text.txt", "masked"),
        ("decoder", "text.txt", "causal"),
        ("decoder", "chat.jsonl", "chat"),
    ],
)
def test_the_objective_follows_from_the_data_and_the_model(place, capsys, model, data, objective):
    recipe = told(capsys, place / model, place / data)
    assert recipe["train"]["objective"] == objective
    assert recipe["model"] == {"folder": str(place / model)}
    assert recipe["data"]["longest"] == 61
    assert recipe["lora"]["rank"] == 0


def test_options_are_keys_of_the_recipe_and_words_come_after_them(place, capsys):
    recipe = told(
        capsys,
        *(
            place / "decoder",
            place / "chat.jsonl",
            "--lora",
            "--rank",
            4,
            "--alpha",
            8,
            "--targets",
            "q,up",
            "--bits",
            8,
        ),
        *("--freeze", 1, "--layer-decay", 0.9, "--epochs", 2, "train.batch=3", "lora.dropout=0.1"),
    )
    assert recipe["lora"] == {"rank": 4, "alpha": 8.0, "targets": ["q", "up"], "dropout": 0.1, "bits": 8}
    part = recipe["train"]
    assert (part["freeze"], part["layer_decay"], part["epochs"], part["batch"]) == (1, 0.9, 2.0, 3)
    assert part["lr"] == pytest.approx(2e-4 * 768 / 24, rel=0.01)  # LoRA's, for this width


def test_a_chat_model_is_taught_with_lora_from_the_command_line(place, tmp_path, capsys):
    before = digest(place / "decoder" / "model.safetensors")
    out = tmp_path / "out"
    words = ["finetune", place / "decoder", place / "chat.jsonl", "--lora", "--epochs", 1, "--out", out]
    assert command(*words, "train.device=cpu", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["steps"] == 7  # 54 conversations, 8 in an update
    assert "LoRA of rank 8 on 4 projections" in said.err
    assert f"Try: monoblock chat {out}" in said.err
    assert digest(place / "decoder" / "model.safetensors") == before
    assert {path.name for path in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert tomllib.loads((out / "recipe.toml").read_text())["train"]["steps"] == 7
    pipe = mb.load(out)
    assert pipe.tokenizer.chat_template == CHATML
    assert isinstance(pipe.chat([{"role": "user", "content": "go up"}], max_new_tokens=3), str)
    assert command("convert", out, "--to", tmp_path / "hf", "--format", "hf") == 0
    ids = torch.randint(1, 290, (2, 11))
    converted = mb.Transformer.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(converted(ids), pipe.model(ids))
    words = ["convert", place / "decoder", "--adapter", out / "adapter", "--to", tmp_path / "merged"]
    assert command(*words) == 0
    together = mb.load(tmp_path / "merged")
    torch.testing.assert_close(together.model(ids), pipe.model(ids), rtol=0, atol=1e-5)
    assert together.tokenizer.chat_template == CHATML
    capsys.readouterr()
    assert command("convert", place / "encoder", "--adapter", out / "adapter", "--to", tmp_path / "other") == 1
    assert "is an adapter for another model" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    torch.manual_seed(6)
    mb.export_hf(mb.Transformer(mb.llama(vocab=300, tie="none", **SMALL)), tmp_path / "alike")
    (tmp_path / "alike" / "tokenizer.json").write_bytes((place / "decoder" / "tokenizer.json").read_bytes())
    assert command("convert", tmp_path / "alike", "--adapter", out / "adapter", "--to", tmp_path / "other") == 1
    assert "was trained beside other weights" in capsys.readouterr().err


def test_an_encoder_is_taught_classes_stopped_and_resumed(place, tmp_path, capsys):
    words = ["finetune", place / "encoder", place / "labelled.tsv", "--epochs", 2, "train.device=cpu", "train.batch=9"]
    assert command(*words, "--out", tmp_path / "whole") == 0
    assert "fresh: head" in capsys.readouterr().err
    assert command(*words, "train.steps=12", "--out", tmp_path / "whole") == 2  # it is there already
    assert "is there already; go on with --resume" in capsys.readouterr().err
    assert command(*words, "--out", tmp_path / "whole", "--resume") == 0
    assert mb.Transformer.from_pretrained(tmp_path / "whole").config.head.classes == 2
    words = ["finetune", tmp_path / "whole", place / "labelled.tsv", "--lora", "train.steps=1", "train.device=cpu"]
    assert command(*words, "--out", tmp_path / "adapted") == 0
    adapter = tmp_path / "adapted" / "adapter"
    assert command("convert", tmp_path / "whole", "--adapter", adapter, "--to", tmp_path / "b") == 0
    assert command("convert", tmp_path / "b", "--to", tmp_path / "c", "--format", "hf") == 0
    for name in ("b", "c"):
        assert mb.load(tmp_path / name).labels == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere", "text.txt"), "there is no such folder"),
        (("decoder", "nothing.txt"), "no corpus, file or folder"),
        (("decoder", "tagged.conll"), "'label' trains encoder-only models"),
        (("decoder", "labelled.tsv"), "or prompt this one for labels: monoblock evaluate MODEL DATA --shots 4"),
        (("encoder", "strange.tsv"), "split valid, row 3: the label 'c' was not seen in training"),
        (("encoder", "strange.conll"), "split valid, row 2: the label 'c' was not seen in training"),
        (("encoder", "chat.jsonl"), "'chat' trains decoder-only models"),
        (("encoder", "tagged.conll", "--objective", "classify"), "the objective classify needs labelled or images"),
        (("decoder", "text.txt", "--objective", "casual"), "did you mean 'causal'"),
        (("decoder", "text.txt", "--lora", "--targets", "qeury"), "did you mean 'query'"),
        (("decoder", "text.txt", "--rank", "4"), "--rank is for adapters; write --lora as well"),
        (("decoder", "text.txt", "--freeze", "9", "model.width=7"), "is not what the weights"),
        (("encoder", "labelled.tsv", "train.lerning=1"), "train has no field 'lerning'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(place, tmp_path, capsys, words, said):
    model, data, *rest = words
    code = command("finetune", place / model, place / data, *rest, "train.device=cpu", "--out", tmp_path / "out")
    text = capsys.readouterr().err
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code in (1, 2)
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()
