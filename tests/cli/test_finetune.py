"""`monoblock finetune`: the objective follows from data and model, options become recipe keys, errors are one line."""

import json
import tomllib

import pytest
import torch
from training_support import file_digest, run_command, train_to_end, write_corpora, write_recipe

import monoblock as mb
from monoblock.tokenizers.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {"width": 24, "depth": 2, "heads": 4, "hidden": 37, "context": 61}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write data of every kind, an encoder and a decoder with a chat template."""
    folder = tmp_path_factory.mktemp("finetune")
    write_corpora(folder)
    rows = (folder / "text.txt").read_text().split(".\n")[:60]
    (folder / "labelled.tsv").write_text("".join(f"{'ab'[n % 2]}\t{row}\n" for n, row in enumerate(rows)))
    (folder / "tagged.conll").write_text(
        "".join("".join(f"{w} {len(w)}\n" for w in row.split()) + "\n" for row in rows)
    )
    (folder / "weather.csv").write_text("label,text\n" + "".join(f"{'ab'[n % 2]},row {n}\n" for n in range(60)))
    for name, part in {"train": range(54), "valid": range(54, 60)}.items():
        for kind in ("labels", "tags"):
            (folder / f"strange_{kind}").mkdir(exist_ok=True)
        labels = {n: "c" if n == 56 else "ab"[n % 2] for n in part}
        text = "".join(f"{label}\t{rows[n]}\n" for n, label in labels.items())
        (folder / "strange_labels" / f"{name}.tsv").write_text(text)
        (folder / "strange_tags" / f"{name}.conll").write_text("".join(f"up {x}\n\n" for x in labels.values()))
    conversations = [
        {"messages": [{"role": "user", "content": r}, {"role": "assistant", "content": r[:9]}]} for r in rows
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations))
    masked = {"family": "bert", "head": "masked_lm", **SMALL}
    changes = {
        "model": masked,
        "tokenizer": {"kind": "bpe", "vocab": 300},
        "train": {"objective": "masked_lm", "steps": 2},
    }
    train_to_end(write_recipe(folder, changes), folder / "encoder")
    arguments = ["<|im_start|>", "<|im_end|>", "eos", "pad"]
    tokenizer = Tokenizer.train("bpe", rows, 300, specials=arguments)
    data, config = tokenizer.content()
    Tokenizer.from_content(data, {**config, "chat_template": CHATML}, "here").save_pretrained(folder / "decoder")
    torch.manual_seed(5)
    mb.export_hf(mb.Transformer(mb.llama(vocab=300, tie="none", **SMALL)), folder / "decoder")
    return folder


def dry_run_recipe(capsys, *arguments):
    """Return the recipe that a dry run prints."""
    assert run_command("finetune", *arguments, "--dry-run") == 0
    return tomllib.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("model", "data", "objective"),
    [
        ("encoder", "labelled.tsv", "classification"),
        ("encoder", "tagged.conll", "token_classification"),
        ("encoder", "text.txt", "masked_lm"),
        ("decoder", "text.txt", "causal_lm"),
        ("decoder", "chat.jsonl", "chat"),
        ("decoder", "weather.csv", "classification"),
    ],
)
def test_the_objective_follows_from_the_data_and_the_model(folder, capsys, model, data, objective):
    recipe = dry_run_recipe(capsys, folder / model, folder / data)
    assert recipe["train"]["objective"] == objective
    assert recipe["model"] == {"folder": str(folder / model)}
    assert recipe["data"]["max_length"] == 61
    assert recipe["lora"]["rank"] == 0


def test_options_become_keys_of_the_recipe_and_overrides_come_last(folder, capsys):
    recipe = dry_run_recipe(
        capsys,
        *(
            folder / "decoder",
            folder / "chat.jsonl",
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
    train = recipe["train"]
    assert (train["freeze_layers"], train["layer_decay"], train["epochs"], train["batch"]) == (1, 0.9, 2.0, 3)
    assert train["lr"] == pytest.approx(2e-4 * 768 / 24, rel=0.01)  # the default of LoRA for this width


def test_a_chat_model_is_fine_tuned_with_lora(folder, tmp_path, capsys):
    before = file_digest(folder / "decoder" / "model.safetensors")
    out = tmp_path / "out"
    arguments = ["finetune", folder / "decoder", folder / "chat.jsonl", "--lora", "--epochs", 1, "--out", out]
    assert run_command(*arguments, "train.device=cpu", "--json") == 0
    message = capsys.readouterr()
    assert json.loads(message.out)["steps"] == 7  # 54 conversations, 8 in an update
    assert "LoRA of rank 8 on 4 projections" in message.err
    assert f"Try: monoblock chat {out}" in message.err
    assert file_digest(folder / "decoder" / "model.safetensors") == before
    assert {path.name for path in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert tomllib.loads((out / "recipe.toml").read_text())["train"]["steps"] == 7
    pipe = mb.load(out)
    assert pipe.tokenizer.chat_template == CHATML
    assert isinstance(pipe.chat([{"role": "user", "content": "go up"}], max_new_tokens=3), str)
    assert run_command("convert", out, "--to", tmp_path / "hf", "--format", "hf") == 0
    ids = torch.randint(1, 290, (2, 11))
    converted = mb.Transformer.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(converted(ids), pipe.model(ids))
    arguments = ["convert", folder / "decoder", "--adapter", out / "adapter", "--to", tmp_path / "merged"]
    assert run_command(*arguments) == 0
    merged = mb.load(tmp_path / "merged")
    torch.testing.assert_close(merged.model(ids), pipe.model(ids), rtol=0, atol=1e-5)
    assert merged.tokenizer.chat_template == CHATML
    capsys.readouterr()
    assert run_command("convert", folder / "encoder", "--adapter", out / "adapter", "--to", tmp_path / "other") == 1
    assert "is an adapter for another model" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    torch.manual_seed(6)
    mb.export_hf(mb.Transformer(mb.llama(vocab=300, tie="none", **SMALL)), tmp_path / "alike")
    (tmp_path / "alike" / "tokenizer.json").write_bytes((folder / "decoder" / "tokenizer.json").read_bytes())
    assert run_command("convert", tmp_path / "alike", "--adapter", out / "adapter", "--to", tmp_path / "other") == 1
    assert "was trained for other weights" in capsys.readouterr().err


def test_an_encoder_becomes_a_classifier_and_is_resumed(folder, tmp_path, capsys):
    arguments = [
        "finetune",
        folder / "encoder",
        folder / "labelled.tsv",
        "--epochs",
        2,
        "train.device=cpu",
        "train.batch=9",
    ]
    assert run_command(*arguments, "--out", tmp_path / "whole") == 0
    assert "fresh: head" in capsys.readouterr().err
    assert run_command(*arguments, "train.steps=12", "--out", tmp_path / "whole") == 2  # it exists already
    assert "is not empty; continue its run with --resume" in capsys.readouterr().err
    assert run_command(*arguments, "--out", tmp_path / "whole", "--resume") == 0
    assert mb.Transformer.from_pretrained(tmp_path / "whole").config.head.classes == 2
    arguments = ["finetune", tmp_path / "whole", folder / "labelled.tsv", "--lora", "train.steps=1", "train.device=cpu"]
    assert run_command(*arguments, "--out", tmp_path / "adapted") == 0
    adapter = tmp_path / "adapted" / "adapter"
    assert run_command("convert", tmp_path / "whole", "--adapter", adapter, "--to", tmp_path / "b") == 0
    assert run_command("convert", tmp_path / "b", "--to", tmp_path / "c", "--format", "hf") == 0
    for name in ("b", "c"):
        assert mb.load(tmp_path / name).labels == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "text.txt"), "nowhere does not exist"),
        (("decoder", "nothing.txt"), "no corpus, file or folder"),
        (("decoder", "tagged.conll"), "'token_classification' trains encoder-only models"),
        (("encoder", "strange_labels"), "split valid, row 3: the label 'c' was not seen in training"),
        (("encoder", "strange_tags"), "split valid, row 3: the label 'c' was not seen in training"),
        (("encoder", "chat.jsonl"), "'chat' trains decoder-only models"),
        (
            ("encoder", "tagged.conll", "--objective", "classification"),
            "the objective classification needs labelled or images",
        ),
        (("decoder", "text.txt", "--objective", "casual"), "did you mean 'causal_lm'"),
        (("decoder", "text.txt", "--lora", "--targets", "qeury"), "did you mean 'query'"),
        (("decoder", "text.txt", "--rank", "4"), "--rank 4 has no effect without --lora; give both or neither"),
        (("decoder", "text.txt", "--freeze", "9", "model.width=7"), "is not what the weights"),
        (("encoder", "labelled.tsv", "train.lerning=1"), "train has no field 'lerning'"),
    ],
)
def test_invalid_arguments_are_one_line_errors(folder, tmp_path, capsys, arguments, message):
    model, data, *rest = arguments
    code = run_command("finetune", folder / model, folder / data, *rest, "train.device=cpu", "--out", tmp_path / "out")
    text = capsys.readouterr().err
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code in (1, 2)
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()
