"""What type checkers see: a user's script under the strictest settings, and options that mirror what they describe."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import monoblock
from monoblock.config.knobs import KNOBS, Knobs
from monoblock.inference.settings import ENGINE_OPTIONS, Settings
from monoblock.nn.generation_options import GenerationOptions, ModelOptions

SOURCE = Path(monoblock.__file__).parents[1]
STRICT = ["--strict", "--disallow-any-expr", "--follow-imports=silent", "--no-error-summary"]

SCRIPT = """\
from collections.abc import Iterator, Sequence
from typing import assert_type

import torch
from torch import Tensor

import monoblock as mb
from monoblock.accounting.report import Account
from monoblock.inspection.trace import Trace
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.classification import Prediction
from monoblock.tasks.loaded_model import Hypothesis
from monoblock.tasks.masked_lm import FilledText
from monoblock.tasks.question_answering import AnswerSpan
from monoblock.tasks.token_classification import TaggedText

run = mb.train("gpt-tiny", {"train.steps": 20}, out="runs/x", callbacks=[print], progress=False)
print(run.folder.name, run.metrics["val_loss"] + 1, run.model.config.width, run.recipe.train.lr)
result = mb.evaluate(run, "kjv", limit=9, samples=2, num_beams=2)
print(result["loss"] + mb.evaluate("runs/x", "kjv", split="test").scores["perplexity"], result.notes)
print(mb.evaluate(mb.Transformer(mb.preset("gpt2")), [({"source": torch.zeros(1, 3)}, torch.zeros(1, 3))])["accuracy"])
engine = mb.Engine(mb.Transformer(mb.preset("gpt2")))
number: int = engine.add([1, 2, 3], mb.Settings(max_new_tokens=20))

pipe = mb.load("runs/x", device="cpu", dtype="bf16")
text: str = pipe.generate("In the beginning", temperature=0.8, seed=1, stop="\\n")
texts: list[str] = pipe.generate(["In the", "And the"], max_new_tokens=9)
samples: list[str] = pipe.generate("In the", temperature=1.0, num_return_sequences=3)
for piece in pipe.stream("In the beginning", top_p=0.9, eos_token_id=[2, 3]):
    print(piece.upper())
for row in pipe.generate_hypotheses(["In the"], num_beams=4, num_return_sequences=2):
    print([(hypothesis.text, hypothesis.score) for hypothesis in row])

messages = [{"role": "user", "content": "Hello"}]
print(pipe.chat(messages, max_new_tokens=9) + "".join(pipe.chat_stream(messages)))
print(pipe.chat([{"role": "user", "content": "Hello"}], draft="8-bit"))

print(pipe.translate("Guten Tag", num_beams=5).upper(), pipe.translate(["a", "b"], long="split", batch=8)[0].upper())
print(pipe.translate("Guten Tag", n_best=3)[0].score, pipe.translate(iter(["a"]), n_best=3, to="hi")[0][0].text)

print(pipe.classify("fine", top=2)[0].probability, pipe.classify(("a", "b"))[0].label)
print(pipe.classify(["fine", "bad"], batch=8, long="cut")[0][0].label.upper())
print(pipe.classify(torch.zeros(3, 32, 32))[0].label, pipe.classify([torch.zeros(3, 32, 32)])[0][0].label)
print(pipe.tag("Ruth went up").entities[0].label, pipe.tag([["Ruth", "went"]])[0].words[0].probability)
print(pipe.fill("[MASK] went").masks[0][0].label, [filled.text for filled in pipe.fill(["[MASK]"], top=3)])
print(pipe.embed(["a", "b"], pooling="cls").shape, pipe.embed(torch.zeros(3, 32, 32)).shape)
print(pipe.answer("Who?", "Ruth went up").upper(), pipe.answer("Who?", "Ruth", n_best=3)[0].start)
print(pipe.answer(["Who?"], ["Ruth"])[0].upper(), pipe.answer([("Who?", "Ruth")], n_best=2, longest=5)[0][0].end)

config = mb.vary(mb.gpt(vocab=65, width=192, depth=6, heads=6, context=256, dropout=0.1), norm="rms", kv_heads=2)
sizes = [other.width for other in (mb.preset("gpt2"), mb.tiny("bert-base-uncased"), mb.ModelConfig.from_json("{}"))]
model = mb.Transformer(config).eval()
rows = [[1, 2, 3]]
ids = torch.tensor(rows)
print(model(ids, attention_mask=torch.ones_like(ids)).softmax(-1).shape, pipe.model(ids).shape)
print(model.generate(ids, max_new_tokens=5).shape, model.generate(ids, draft=model, num_return_sequences=1).shape)
for tokens in model.stream(ids, max_new_tokens=5, attention_mask=torch.ones_like(ids)):
    print(tokens.shape)
model.save_pretrained("folder")
print(mb.Transformer.from_pretrained("folder", dtype=torch.float16, device="cpu").config.family)

tokenizer = mb.Tokenizer.train("bpe", ["In the beginning"], vocab_size=300)
print(tokenizer.decode(tokenizer.encode(text)), mb.Tokenizer.from_pretrained("folder").pieces(text)[0].start)
print(tokenizer.apply_chat_template(messages), pipe.tokenizer.vocab_size)

account = mb.account("gpt2")
print(account.parameters + account.flops(batch=2).training, account.training_bytes(dtype="bf16").total)
trace = mb.trace(model, ids, names="decoder.*.attention.weights")
print(trace.logits.shape, {name: activation.shape for name, activation in trace.items()})
"""

TYPES = {
    "run": "mb.Run",
    "run.model": "mb.Transformer | mb.Recurrent",
    "run.metrics": "dict[str, float]",
    "result": "mb.Evaluation",
    "result['loss']": "float",
    "pipe.predict(['a'])": "Sequence[object]",
    "pipe": "Pipeline",
    "pipe.model": "mb.Transformer | mb.Recurrent",
    "pipe.generate('a')": "str",
    "pipe.generate('a', num_return_sequences=2)": "list[str]",
    "pipe.generate(['a'])": "list[str]",
    "pipe.generate(['a'], num_return_sequences=2)": "list[list[str]]",
    "pipe.stream('a')": "Iterator[str]",
    "pipe.translate('a')": "str",
    "pipe.translate('a', n_best=2)": "list[Hypothesis]",
    "pipe.translate(['a'])": "list[str]",
    "pipe.translate(['a'], n_best=2)": "list[list[Hypothesis]]",
    "pipe.classify('a')": "list[Prediction]",
    "pipe.classify(('a', 'b'))": "list[Prediction]",
    "pipe.classify(['a'])": "list[list[Prediction]]",
    "pipe.classify([('a', 'b'), 'c'])": "list[list[Prediction]]",
    "pipe.classify(torch.zeros(3, 8, 8))": "list[Prediction]",
    "pipe.tag('a')": "TaggedText",
    "pipe.tag(['a'])": "list[TaggedText]",
    "pipe.fill('a')": "FilledText",
    "pipe.fill(['a'])": "list[FilledText]",
    "pipe.embed('a')": "Tensor",
    "pipe.answer('a', 'b')": "str",
    "pipe.answer('a', 'b', n_best=2)": "list[AnswerSpan]",
    "pipe.answer(['a'], ['b'])": "list[str]",
    "pipe.answer([('a', 'b')], n_best=2)": "list[list[AnswerSpan]]",
    "model(ids)": "Tensor",
    "model.generate(ids)": "Tensor",
    "model.stream(ids)": "Iterator[Tensor]",
    "mb.Transformer.from_pretrained('a')": "mb.Transformer",
    "mb.Recurrent(mb.RecurrentConfig(vocab=9, width=8))(ids)": "Tensor",
    "mb.vary(config, depth=2)": "mb.ModelConfig",
    "mb.account('gpt2')": "Account",
    "mb.trace(model, ids)": "Trace",
}

MISTAKES = [
    "pipe.generate('a', temprature=1)",
    "pipe.generate('a', max_new_tokens='9')",
    "pipe.translate('a', long='cut')",
    "pipe.classify(5)",
    "model.generate(ids, max_tokens=5)",
    "model(ids, mask=ids)",
    "mb.vary(config, nrm='rms')",
    "mb.gpt(vocab=9, width=8, depth=1, heads=1, context=9, norm='group')",
]


def run_mypy(folder: Path, script: str) -> dict[int, str]:
    """Write a script; return what mypy prints about it, by the number of the line, counted from 0."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *STRICT, "--config-file=", f"--cache-dir={folder / 'cache'}", "script.py"],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    printed: dict[int, str] = {}
    for line in done.stdout.splitlines():
        number = int(line.split(":")[1]) - 1
        printed[number] = f"{printed.get(number, '')}{line}\n"
    return printed


@pytest.mark.slow
def test_a_type_checker_finds_no_any_in_the_script_of_a_user_and_finds_every_mistake(tmp_path):
    pytest.importorskip("mypy")
    script = SCRIPT + "".join(f"assert_type({expression}, {kind})\n" for expression, kind in TYPES.items())
    first_mistake = script.count("\n")
    printed = run_mypy(tmp_path, script + "".join(f"{call}\n" for call in MISTAKES))
    assert not [text for number, text in printed.items() if number < first_mistake]
    missed = [call for number, call in enumerate(MISTAKES, first_mistake) if "error:" not in printed.get(number, "")]
    assert not missed


FAMILY_PARTS = """\
# mypy: disallow-any-expr=False
import monoblock as mb

depth: int = mb.preset("gpt2").decoder.depth + mb.preset("bert-base").encoder.depth
kind: str = mb.preset("gpt2").head.kind.upper()
model = mb.Transformer(mb.preset("gpt2"))
for block in model.decoder.blocks:
    print(block.config.width)
print(mb.preset("gpt2").decoder.dept)
"""


@pytest.mark.slow
def test_a_type_checker_accepts_the_stack_and_the_head_that_a_family_has(tmp_path):
    pytest.importorskip("mypy")
    printed = run_mypy(tmp_path, FAMILY_PARTS)
    assert list(printed) == [FAMILY_PARTS.count("\n") - 1], printed  # the misspelled name alone
    assert 'has no attribute "dept"' in printed[FAMILY_PARTS.count("\n") - 1]


# Options that accept more than the settings of one request hold: lists of tokens, and a seed for each prompt.
WIDER = {"eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "seed", "logits_processor"}


def test_generation_options_are_the_fields_of_settings():
    options, settings = get_type_hints(GenerationOptions), get_type_hints(Settings)
    assert set(options) - {"truncation"} == {field.name for field in fields(Settings)} - {
        *ENGINE_OPTIONS
    }  # it changes the prompt itself
    assert {name for name in options if name in settings and options[name] != settings[name]} == WIDER
    assert set(options) < set(get_type_hints(ModelOptions))


def test_knob_options_are_the_knobs():
    assert set(get_type_hints(Knobs)) == set(KNOBS)
