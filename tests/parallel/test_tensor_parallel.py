"""Processes that share every matrix compute what one process computes: outputs, gradients and generated texts."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensor_parallel_worker
import torch
from processes import run_ranks
from torch.distributed import run as torchrun
from training_support import train_to_end, write_recipe

import monoblock as mb
from monoblock.cli.main import run
from monoblock.config.knobs import rebuild
from monoblock.config.model import AttentionConfig, BlockConfig, Buckets, FeedForwardConfig, Rotary
from monoblock.interop.gguf.writer import save_gguf
from monoblock.interop.model_folder import load_model
from monoblock.parallel.launch import launch as start_processes

PRESETS = (
    "bart-base",
    "bert-base",
    "bloom-560m",
    "command-r",
    "falcon-7b",
    "gemma2-2b",
    "gpt2",
    "gptj-6b",
    "llama3-8b",
    "mixtral-8x7b",
    "modernbert-base",
    "olmo2-7b",
    "persimmon-8b",
    "qwen3-0.6b",
    "t5-base",
    "vit-b16",
)


def with_heads(config, heads, kv_heads):
    """Return a configuration whose attention has so many heads."""

    def edit(part, values):
        if isinstance(part, AttentionConfig):
            grouped = part.num_kv_heads != part.heads
            values.update(heads=heads, kv_heads=kv_heads if grouped else None)
            if isinstance(part.positions, Rotary):  # which rotates pairs
                values["head_dim"] = 10

    return rebuild(config, edit)


def add_sinks_and_biases(part, values):
    if isinstance(part, AttentionConfig):
        values["sinks"] = True
    if isinstance(part, FeedForwardConfig):
        values["bias"] = True


def add_gains(part, values):
    if isinstance(part, BlockConfig):
        values["layer_scale"] = 0.5


def separate_buckets(part, values):
    if isinstance(part, Buckets):
        values["shared"] = False


GENERATING = {"bloom-560m", "gpt2", "llama3-8b", "mixtral-8x7b", "one key/value head", "t5-base", "heads do not divide"}


def make_configs():
    configs = {name: with_heads(mb.tiny(name), 4, 2) for name in PRESETS}
    configs["one key/value head"] = mb.llama(vocab=61, width=24, depth=2, heads=4, kv_heads=1, hidden=34, context=37)
    configs["sinks and biases of experts"] = rebuild(configs["mixtral-8x7b"], add_sinks_and_biases)
    configs["gains of sublayers"] = rebuild(configs["gpt2"], add_gains)
    configs["a position bias in each layer"] = rebuild(configs["t5-base"], separate_buckets)
    configs["heads do not divide"] = mb.t5(vocab=61, width=24, depth=2, heads=3, head_dim=8, hidden=35, context=37)
    return configs


def randomize(model):
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model.eval()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("tensor_parallel")


@pytest.fixture(scope="module")
def trained(root):
    """The folder of a run, which has a tokenizer."""
    model = {"width": 24, "heads": 4, "context": 48}
    write_recipe(root / "run", {"model": model, "train": {"steps": 30}})
    train_to_end(root / "run/recipe.toml", root / "run/out")
    return root / "run"


@pytest.fixture(scope="module")
def commands(trained):
    folder, corpus = str(trained / "out"), str(trained / "text.txt")
    return [
        (["generate", folder, "the king", "--max-new-tokens", "12", "--temperature", "0"], ""),
        (["generate", folder, "-", "--seed", "3", "--json", "--nproc=2"], "the kïng said"),
        (["generate", folder, "the", "--num-beams", "3", "--num-return-sequences", "2"], ""),
        (["evaluate", folder, corpus, "--json", "--at-most", "loss=100"], ""),
        (["evaluate", folder, corpus, "--limit", "20", "--at-most", "loss=0.01"], ""),
    ]


@pytest.fixture(scope="module")
def cases(root):
    cases = {}
    for name, config in make_configs().items():
        model = randomize(mb.Transformer(config))
        model.save_pretrained(root / name)
        cases[name] = {"folder": str(root / name), "kind": config.family, "generates": name in GENERATING}
    for name in ("gpt2", "mixtral-8x7b"):  # stored fused, and one tensor an expert
        mb.export_hf(mb.Transformer.from_pretrained(root / name), root / f"{name} of Hugging Face")
        cases[f"{name} of Hugging Face"] = cases[name] | {
            "folder": str(root / f"{name} of Hugging Face"),
            "generates": False,
        }
    path = root / "llama3-8b.gguf"
    save_gguf(mb.Transformer.from_pretrained(root / "llama3-8b"), path)
    cases["llama3-8b of GGUF"] = cases["llama3-8b"] | {"folder": str(path), "generates": False}
    return cases


@pytest.fixture(scope="module")
def seen(root, cases, commands):
    """What each of two processes saw."""
    (root / "cases.json").write_text(json.dumps([cases, commands]))
    run_ranks(tensor_parallel_worker.main, root, 2)
    return [json.loads((root / f"seen-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", [*make_configs(), "gpt2 of Hugging Face", "mixtral-8x7b of Hugging Face"])
def test_outputs_and_gradients_are_those_of_one_process(name, seen):
    for process in seen:
        assert process[name]["logits"] < 1e-9
        assert process[name]["gradients"][1] < 1e-9, process[name]["gradients"]


@pytest.mark.parametrize("name", make_configs())
def test_divided_positions_give_the_outputs_and_gradients_of_one_process(name, seen):
    """11 positions and a source of 11 for a target of 7, divided among two processes, with recomputed blocks."""
    for process in seen:
        assert process[name]["divided logits"] < 1e-9
        assert process[name]["divided gradients"][1] < 1e-9, process[name]["divided gradients"]


def test_all_processes_generate_the_tokens_of_one_process(seen):
    for name in GENERATING:
        for process in seen:
            assert process[name]["differ"] == [], name
        assert seen[0][name]["fresh seed"] == seen[1][name]["fresh seed"]


def test_a_split_model_is_not_optimized(seen):
    for name in GENERATING:
        assert seen[0][name]["refusal"] == "input.token has hooks or methods of its own"


def test_each_process_reads_and_caches_its_part_only(cases, seen):
    for process in seen:
        for name in cases:
            result = process[name]
            if name not in ("heads do not divide", "olmo2-7b"):  # whose attention is computed by all
                assert result["stored"] < 0.58 * result["whole"], name
                assert result.get("cache", 0.5) == (1.0 if name == "one key/value head" else 0.5)
            assert result["memory"] == 8 * result["stored"], "fp64, and no memory of another process"


def test_the_command_line_prints_the_text_and_metrics_of_one_process_once(commands, seen, monkeypatch, capsys):
    for number, (words, text) in enumerate(commands):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = run([word for word in words if word != "--nproc=2"])
        out, (main, other) = capsys.readouterr().out, (process["commands"][number] for process in seen)
        assert (main[0], other[0]) == (code, code)
        assert words_and_numbers(main[1]) == words_and_numbers(out)
        assert other[1:] == ["", ""]


def words_and_numbers(out):
    """Return the words of an output, its numbers rounded, without the duration."""
    lines = [line for line in out.splitlines() if '"seconds"' not in line]
    return [re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.4f}", line) for line in lines]


def launch(*words, text=""):
    environment = os.environ | {"PYTHONPATH": str(Path(mb.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "monoblock", *map(str, words), "--nproc", "2"]
    return subprocess.run(command, env=environment, input=text, capture_output=True, text=True, timeout=600)


def test_torchrun_leaves_the_options_of_a_command_alone(monkeypatch):
    """`--nproc` and `--max` are abbreviations of several options of torchrun."""
    started = []
    monkeypatch.setattr(torchrun, "run", started.append)
    words = ["generate", "FOLDER", "--nproc", "2", "--max", "5", "--", "- and"]
    assert start_processes(words, 2, "cpu") == 0
    assert (started[0].training_script, started[0].training_script_args) == ("monoblock", words)


@pytest.mark.slow
def test_nproc_starts_the_processes_and_the_main_one_reads_standard_input(trained, seen, commands):
    done = launch("generate", trained / "out", "-", "--max-new-tokens", 12, "--temperature", 0, text="the king")
    assert (done.returncode, done.stdout) == (0, seen[0]["commands"][0][1]), done.stderr


@pytest.mark.slow
def test_an_error_of_all_processes_is_one_line(trained):
    done = launch("evaluate", trained / "out", "nowhere.txt")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: there is no corpus")
    assert done.stderr.count("\n") == 1


def test_what_cannot_be_shared_is_refused_in_one_line(root):
    mb.quantize(randomize(mb.Transformer(make_configs()["gpt2"])), bits=8).save_pretrained(root / "quantized")
    with pytest.raises(mb.InputError, match="a quantized model, which several processes cannot share"):
        load_model(mb.Transformer, root / "quantized", mesh=object())
