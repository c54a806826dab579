"""Every published class of rows.py: its folder read by us gives the same logits, and is written back the same.

python tests/parity/test_logits.py        prints the largest difference of every row
"""

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rows import CLASSIFIER_BASES, PUBLISHED_MODELS, VOCAB, PublishedModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from monoblock.config.model import EmbeddingConfig, FramesConfig  # noqa: E402
from monoblock.interop.huggingface.export import export_hf  # noqa: E402
from monoblock.interop.huggingface.load import FAMILIES  # noqa: E402
from monoblock.model import Transformer  # noqa: E402

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}  # fine enough to tell a norm's eps of 1e-12 from 1e-11
SOURCE_LENGTH, TARGET_LENGTH = 23, 19  # longer than a window, and than the distances for which T5 has a bucket each
PADDING_LENGTHS = (0, 4, 9)  # of each row of the batch
PROMPT_LENGTH = 11  # read at once, the rest token by token; longer than the ring buffer of a window
PAD_ID, FIRST_ID = 1, 3  # valid tokens come after the special ones
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": PAD_ID}

Comparison = tuple[str, torch.Tensor, torch.Tensor]  # mode, our output, their output


# -- models -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Build and run models in `dtype`; in fp64 both models also compute in fp64 what they otherwise compute in fp32.

    Published classes compute softmax, norms and angles in fp32 whatever their dtype, which alone leaves 1e-7.
    """
    previous_dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch, "float32", dtype)
            patch.setattr(torch, "float", dtype)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(torch, "FloatTensor", torch.DoubleTensor)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)  # tensors this small are faster with one thread
        try:
            yield
        finally:
            torch.set_default_dtype(previous_dtype)
            torch.set_num_threads(threads)


def published_class(row: PublishedModel) -> Any:
    """Return the published class, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, row.class_name)


def random_model(row: PublishedModel, generator: torch.Generator) -> torch.nn.Module:
    """Build the published class with random weights, so that no norm is the identity and no bias zero."""
    cls = getattr(transformers, row.class_name)
    config = cls.config_class(**(SPECIAL_IDS | row.config_fields))
    config._attn_implementation, config._experts_implementation = row.attn_implementation, "eager"
    model = cls(config).eval()
    if row.stores_tied_output:  # as the class does when the file has a separate output matrix
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for weight in stored_tensors(model):
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(weight + 0.3 * noise if weight.dim() == 1 else noise * weight.shape[-1] ** -0.5)
    return model


def stored_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the stored tensors of a model, a tied weight once."""
    computed = model._keys_to_ignore_on_save or ()
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key not in computed}
    return iter({tensor.data_ptr(): tensor for tensor in tensors.values()}.values())


# -- inputs and outputs -----------------------------------------------------------------------------------------------


def attention_mask(length: int, side: str) -> torch.Tensor:
    """Build a mask (B, T), 1 for valid tokens; `side` of the padding is none, left or right."""
    columns, lengths = torch.arange(length), torch.tensor(PADDING_LENGTHS)[:, None]
    valid = {"none": columns >= 0 * lengths, "left": columns >= lengths, "right": columns < length - lengths}
    return valid[side].long()


def random_tokens(
    valid: torch.Tensor, generator: torch.Generator, vocab: int = VOCAB, eos_id: int | None = None
) -> torch.Tensor:
    ids = torch.randint(FIRST_ID, vocab if eos_id is None else eos_id, valid.shape, generator=generator)
    if eos_id is not None:
        ids = ids.masked_fill(valid.flip(-1).cumsum(-1).flip(-1) == 1, eos_id)  # the last valid token
    return ids.masked_fill(valid == 0, PAD_ID)


def random_features(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(len(PADDING_LENGTHS), *shape, generator=generator, dtype=torch.float64).to(
        torch.get_default_dtype()
    )


def select_output(output: Any, ours: torch.Tensor) -> torch.Tensor:
    """Select the first output of theirs with as many elements as ours; a binary classifier drops the last axis."""
    names = ("logits", "text_embeds", "image_embeds", "pooler_output", "last_hidden_state")
    outputs = [output[name] for name in names if output.get(name) is not None]
    return next(output.reshape(ours.shape) for output in outputs if output.numel() == ours.numel())


def compare_images(ours: Transformer, theirs: torch.nn.Module, generator: torch.Generator) -> Iterator[Comparison]:
    pixels = random_features(generator, 3, 12, 12)
    logits = ours(pixels)
    yield "plain", logits, select_output(theirs(pixel_values=pixels), logits)


def compare_tokens(
    row: PublishedModel, ours: Transformer, theirs: torch.nn.Module, padding_side: str, generator: torch.Generator
) -> Iterator[Comparison]:
    """Compare the outputs of valid tokens, computed at once and, for a decoder, through the cache."""
    valid = attention_mask(SOURCE_LENGTH, padding_side)
    ids = random_tokens(valid, generator, eos_id=row.eos_token_id)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": valid}
    if ours.config.family == "encoder-decoder":
        source, source_mask = ids, valid
        if isinstance(ours.config.input, FramesConfig):
            source, source_mask = (
                random_features(generator, ours.config.input.channels, 2 * ours.config.input.context),
                None,
            )
            inputs = {"input_features": source}
        valid = attention_mask(TARGET_LENGTH, padding_side)
        ids = random_tokens(valid, generator, ours.config.target_input.vocab)
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": valid}

        def run_ours(ids_chunk: torch.Tensor, mask_chunk: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return ours(source, ids_chunk, source_mask, mask_chunk, cache=cache)

    else:
        assert isinstance(ours.config.input, EmbeddingConfig)
        segments = None
        if ours.config.input.segments > 1:
            segments = inputs["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=generator)
        if row.accepts_position_ids:
            inputs["position_ids"] = (valid.cumsum(-1) - 1).clamp(min=0)

        def run_ours(ids_chunk: torch.Tensor, mask_chunk: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return ours(ids_chunk, attention_mask=mask_chunk, segments=segments, cache=cache)

    logits = run_ours(ids, valid)
    reference = select_output(theirs(**inputs), logits)
    selected = valid.bool() if reference.dim() == 3 else ...
    yield "plain", logits[selected], reference[selected]
    if ours.config.decoder is not None and reference.dim() == 3:
        mode, prompt = ("stepped", 1) if padding_side == "none" else ("prompted", PROMPT_LENGTH)
        yield mode, decode(ours, ids, valid, prompt, run_ours)[selected], reference[selected]


def decode(ours: Transformer, ids: torch.Tensor, valid: torch.Tensor, prompt: int, run_ours: Any) -> torch.Tensor:
    """Run a prompt at once and the rest one token at a time."""
    cache = ours.make_cache(len(PADDING_LENGTHS), ids.shape[1], chunk=2)
    lengths = [prompt, *[1] * (ids.shape[1] - prompt)]
    logits = []
    for ids_chunk, mask_chunk in zip(ids.split(lengths, 1), valid.split(lengths, 1), strict=True):
        logits.append(run_ours(ids_chunk, mask_chunk, cache))
        cache.advance(ids_chunk.shape[1] if bool(valid.all()) else mask_chunk.sum(-1))
    return torch.cat(logits, 1)


def compare_models(row: PublishedModel, ours: Transformer, theirs: torch.nn.Module) -> Iterator[Comparison]:
    """Compare the two models in every mode."""
    generator = torch.Generator().manual_seed(2)
    if ours.config.family == "vision":
        yield from compare_images(ours, theirs, generator)
        return
    for padding_side in ("none", *row.padding_sides):
        for mode, logits, reference in compare_tokens(row, ours, theirs, padding_side, generator):
            yield mode if padding_side == "none" else f"{mode} {padding_side}", logits, reference


def run_published(
    row: PublishedModel, dtype: torch.dtype, folder: Path
) -> tuple[list[Comparison], Transformer, torch.nn.Module]:
    published_class(row)  # before any patch
    with precision(dtype), torch.no_grad():
        theirs = random_model(row, torch.Generator().manual_seed(1))
    theirs.save_pretrained(folder)
    ours = Transformer.from_pretrained(folder, dtype=dtype).eval()
    with precision(dtype), torch.no_grad():
        return list(compare_models(row, ours, theirs)), ours, theirs


def load_with_transformers(row: PublishedModel, folder: Path, reference: torch.nn.Module) -> torch.nn.Module:
    """Load our folder with transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, row.class_name).from_pretrained(
            folder, attn_implementation=row.attn_implementation, experts_implementation="eager"
        )


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64], ids=str)
@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_a_published_model_is_loaded_with_its_logits_and_exported_with_its_tensors(name, dtype, tmp_path):
    row = PUBLISHED_MODELS[name]
    comparisons, ours, theirs = run_published(row, dtype, tmp_path / "theirs")
    for mode, logits, reference in comparisons:
        assert logits.dtype == reference.dtype == dtype
        difference = float((logits - reference).abs().max())
        assert difference <= max(TOLERANCE[dtype], row.extra_tolerance), f"{mode}: {difference:.1e} apart"
        assert torch.equal(logits.argmax(-1), reference.argmax(-1)), f"{mode}: another token is the most likely"
    export_hf(ours, tmp_path / "ours", family=theirs.config.model_type, special_token_ids=SPECIAL_IDS)
    original, exported = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert exported.keys() == original.keys()
    for key, tensor in original.items():
        assert tensor.dtype == exported[key].dtype
        assert torch.equal(tensor, exported[key]), key
    if dtype == torch.float32:
        with torch.no_grad():
            _, logits, reference = next(
                compare_models(row, ours, load_with_transformers(row, tmp_path / "ours", theirs))
            )
            difference = float((logits - reference).abs().max())
            assert difference <= TOLERANCE[dtype], f"written by us and read by transformers: {difference:.1e} apart"


LABELLED = [name for name in PUBLISHED_MODELS if "regression" in name or "classifier" in name]
OTHER_DECODERS = {f"{name} classifier" for name, _ in CLASSIFIER_BASES.values()} - {
    "llama classifier",
    "gpt2 classifier",
}


@pytest.mark.parametrize("name", [name for name in LABELLED if name not in OTHER_DECODERS])
def test_a_regression_keeps_its_problem_type_and_a_classifier_has_none(name, tmp_path):
    row = PUBLISHED_MODELS[name]
    _, ours, theirs = run_published(row, torch.float32, tmp_path / "theirs")
    export_hf(ours, tmp_path / "ours", family=theirs.config.model_type, special_token_ids=SPECIAL_IDS)
    loaded = load_with_transformers(row, tmp_path / "ours", theirs)
    kind = "regression" if "regression" in name else "classifier"
    assert (ours.config.head.kind, ours.config.head.classes) == (kind, row.config_fields["num_labels"])
    assert loaded.config.problem_type == theirs.config.problem_type == row.config_fields.get("problem_type")
    assert loaded.config.num_labels == theirs.config.num_labels
    assert loaded.config.id2label == theirs.config.id2label
    assert Transformer.from_pretrained(tmp_path / "ours").config == ours.config
    assert ("problem_type" in (tmp_path / "ours" / "config.json").read_text()) == (kind == "regression")


LANGUAGE_MODELS = [
    name for name, row in PUBLISHED_MODELS.items() if row.class_name.endswith(("ForCausalLM", "LMHeadModel"))
]
FREELY_TIED = [
    name
    for name in LANGUAGE_MODELS
    if not PUBLISHED_MODELS[name].stores_tied_output and not PUBLISHED_MODELS[name].requires_tying
]


@pytest.mark.parametrize("name", FREELY_TIED)
def test_a_decoder_with_the_opposite_tying_is_loaded_and_exported(name, tmp_path):
    """Tied models are untied and the others tied; the tensors in the file decide."""
    row = PUBLISHED_MODELS[name]
    tied = published_class(row).config_class(**(SPECIAL_IDS | row.config_fields)).tie_word_embeddings
    row = replace(row, config_fields=row.config_fields | {"tie_word_embeddings": not tied})
    comparisons, ours, theirs = run_published(row, torch.float32, tmp_path / "theirs")
    assert (ours.config.tie == "none") is tied
    for mode, logits, reference in comparisons:
        assert float((logits - reference).abs().max()) <= TOLERANCE[torch.float32], mode
    export_hf(ours, tmp_path / "ours", family=theirs.config.model_type, special_token_ids=SPECIAL_IDS)
    original, exported = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert exported.keys() == original.keys()
    assert all(torch.equal(tensor, exported[key]) for key, tensor in original.items())


def test_every_family_has_a_row():
    model_types = {published_class(row).config_class.model_type for row in PUBLISHED_MODELS.values()}
    assert model_types == set(FAMILIES)
    assert len(model_types) >= 45


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"{'':26}{'largest':>9}{'fp32':>10}{'fp64':>10}   the mode that differs most in fp32")
    for name, row in PUBLISHED_MODELS.items():
        differences = {}
        for dtype in TOLERANCE:
            with tempfile.TemporaryDirectory() as folder:
                comparisons, _, _ = run_published(row, dtype, Path(folder))
            differences[dtype] = {
                mode: float((logits - reference).abs().max()) for mode, logits, reference in comparisons
            }
        single, double = differences.values()
        size = max(float(reference.abs().max()) for _, _, reference in comparisons)
        worst = max(single, key=single.__getitem__)
        print(f"{name:26}{size:9.1f}{single[worst]:10.1e}{max(double.values()):10.1e}   {worst}")


if __name__ == "__main__":
    main()
