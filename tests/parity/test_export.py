"""Every published class of rows.py, loaded and written again, is the same to its own class of transformers.

No tensor is missing or unexpected, and the labels, the tokenizer, the chat template, the settings of generation, the
fields of config.json, the dtype and the logits are equal.  The slow tests do this for every row, and for every way.
"""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rows import PUBLISHED_MODELS, VOCAB  # noqa: E402
from test_logits import published_class, random_model  # noqa: E402

import monoblock as mb  # noqa: E402
from monoblock.cli.main import run  # noqa: E402
from monoblock.interop.convert import open_model, write_model  # noqa: E402
from monoblock.model import Transformer  # noqa: E402

TEXT = "the cat sat on the mat, a hat in hand; 3 of 5 did. "
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
PUBLISHED_GENERATION = {
    "temperature": 0.7,
    "top_k": 17,
    "max_new_tokens": 23,
    "do_sample": True,
    "eos_token_id": [2, 5],
}


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of the size of the models, with a chat template."""
    trained = mb.Tokenizer.train("char", [TEXT], VOCAB)
    trained.chat_template = TEMPLATE
    return trained


def family_of(name):
    return published_class(PUBLISHED_MODELS[name]).config_class.model_type


FIRST_ROWS = list({family_of(name): name for name in reversed(PUBLISHED_MODELS)}.values())[::-1]


def save_published(name, tokenizer, folder, dtype=torch.bfloat16):
    """Save a class of theirs with random weights, and all that a published folder has beside them."""
    row = PUBLISHED_MODELS[name]
    theirs = random_model(row, torch.Generator().manual_seed(1)).to(dtype)
    theirs.config.dtype = dtype
    for field in ("hidden_dropout_prob", "attention_dropout", "dropout", "resid_pdrop"):
        if hasattr(theirs.config, field):
            setattr(theirs.config, field, 0.37)
    if "num_labels" in row.config_fields:
        theirs.config.id2label = {n: f"kind {n}" for n in range(row.config_fields["num_labels"])}
        theirs.config.label2id = {label: n for n, label in theirs.config.id2label.items()}
    if theirs.can_generate():
        theirs.generation_config = transformers.GenerationConfig(**PUBLISHED_GENERATION)
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"model_max_length": 29, "padding_side": "left"}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    return theirs


def by_python(source, target):
    mb.export_hf(Transformer.from_pretrained(source), target)


def by_conversion(source, target):
    with open_model(source) as model:
        write_model(model, target, "hf")


def through_our_folder(source, target):
    Transformer.from_pretrained(source).save_pretrained(target.parent / "ours")
    mb.export_hf(Transformer.from_pretrained(target.parent / "ours"), target)


def by_command(source, target):
    assert run(["convert", str(source), "--to", str(target), "--format", "hf"]) == 0


WAYS = {way.__name__: way for way in (by_python, by_conversion, through_our_folder, by_command)}


def load_as_its_class(folder, row):
    """Load a folder with the class that its config.json names."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    assert name == row.class_name
    return getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True, attn_implementation=row.attn_implementation, experts_implementation="eager"
    )


def inputs_of(model):
    """Random inputs for any class, by the names of its arguments."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB - 10, (2, 13), generator=generator)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.rand(2, 3, 12, 12, generator=generator).to(model.dtype)}
    if model.main_input_name == "input_features":
        frames = torch.rand(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": frames.to(model.dtype), "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if config.is_encoder_decoder else {})


def assert_same_to_transformers(before, after, row):
    """Compare two folders as transformers sees them."""
    (theirs, _), (ours, info) = load_as_its_class(before, row), load_as_its_class(after, row)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert ours.dtype == theirs.dtype == torch.bfloat16
    old, new = (model.config.to_dict() for model in (theirs, ours))
    changed = {key: (value, new.get(key)) for key, value in old.items() if key[0] != "_" and new.get(key) != value}
    assert not changed
    if theirs.can_generate():
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    first, second = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (before, after))
    assert first(TEXT)["input_ids"] == second(TEXT)["input_ids"]
    assert first.chat_template == second.chat_template == TEMPLATE
    assert (second.model_max_length, second.padding_side) == (29, "left")
    assert first.special_tokens_map == second.special_tokens_map
    with torch.no_grad():
        outputs = [model(**inputs_of(model)) for model in (theirs, ours)]
    for name, value in outputs[0].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, outputs[1][name]), name
    assert (before / "preprocessor_config.json").read_bytes() == (after / "preprocessor_config.json").read_bytes()


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[] if name in FIRST_ROWS and way == "by_python" else pytest.mark.slow)
        for name in PUBLISHED_MODELS
        for way in WAYS
    ],
)
def test_a_model_of_every_family_comes_back_to_its_own_class_with_everything(name, way, tokenizer, tmp_path):
    save_published(name, tokenizer, tmp_path / "theirs")
    WAYS[way](tmp_path / "theirs", tmp_path / "out")
    assert_same_to_transformers(tmp_path / "theirs", tmp_path / "out", PUBLISHED_MODELS[name])
