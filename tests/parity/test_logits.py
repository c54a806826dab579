"""Published classes against the block: a folder of theirs read by us gives the same logits, and written back the same
folder.  One test over the rows of rows.py; nothing here knows a model by name.

python tests/parity/test_logits.py        prints the greatest difference of every row
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

from rows import ROWS, VOCAB, Row  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from monoblock.config import EmbeddingConfig, FramesConfig  # noqa: E402
from monoblock.interop.hf import export_hf  # noqa: E402
from monoblock.interop.hf_table import FAMILIES  # noqa: E402
from monoblock.model import Transformer  # noqa: E402

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}  # fine enough to tell a norm's eps of 1e-12 from 1e-11
TOKENS, TARGET = 23, 19  # longer than a window, and than the distances T5 tells apart exactly
PADDING = (0, 4, 9)  # of each row of the batch
PROMPT = 11  # read at once, the rest token by token; longer than the ring of a window has room for
PAD_ID, FIRST_ID = 1, 3  # real tokens start after the special ones
SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": PAD_ID}

Answers = tuple[str, torch.Tensor, torch.Tensor]  # how it was run, ours, theirs


# -- the two models -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Models built and run in `dtype`; in fp64 both sides also do in fp64 what they otherwise do in fp32.

    Published classes make softmax, norms and angles in fp32 whatever their weights are, which alone leaves 1e-7.
    """
    usual, threads = torch.get_default_dtype(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch, "float32", dtype)
            patch.setattr(torch, "float", dtype)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(torch, "FloatTensor", torch.DoubleTensor)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)  # sums this short lose more by waiting for a second thread than it gives
        try:
            yield
        finally:
            torch.set_default_dtype(usual)
            torch.set_num_threads(threads)


def imported(row: Row) -> Any:
    """The published class; its module may warn when it is first read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, row.model)


def published(row: Row, draw: torch.Generator) -> torch.nn.Module:
    """The published class with every weight drawn anew, so that no norm is the identity and no bias zero."""
    cls = getattr(transformers, row.model)
    config = cls.config_class(**(SPECIAL | row.sizes))
    config._attn_implementation, config._experts_implementation = row.kernel, "eager"
    model = cls(config).eval()
    if row.untie:  # what a class does when it finds an output of its own in a file
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for weight in stored(model):
            noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            weight.copy_(weight + 0.3 * noise if weight.dim() == 1 else noise * weight.shape[-1] ** -0.5)
    return model


def stored(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What is stored of a model, a tied weight once."""
    left_out = model._keys_to_ignore_on_save or ()
    kept = {key: tensor for key, tensor in model.state_dict().items() if key not in left_out}
    return iter({tensor.data_ptr(): tensor for tensor in kept.values()}.values())


# -- what they are given, and what they say -----------------------------------------------------------------------


def mask(length: int, side: str) -> torch.Tensor:
    """(B, T) 1 for real tokens; padded on no side, on the left or on the right."""
    columns, padding = torch.arange(length), torch.tensor(PADDING)[:, None]
    real = {"none": columns >= 0 * padding, "left": columns >= padding, "right": columns < length - padding}
    return real[side].long()


def tokens(real: torch.Tensor, draw: torch.Generator, below: int = VOCAB, end: int | None = None) -> torch.Tensor:
    ids = torch.randint(FIRST_ID, below if end is None else end, real.shape, generator=draw)
    if end is not None:
        ids = ids.masked_fill(real.flip(-1).cumsum(-1).flip(-1) == 1, end)  # the last real one
    return ids.masked_fill(real == 0, PAD_ID)


def features(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(len(PADDING), *shape, generator=draw, dtype=torch.float64).to(torch.get_default_dtype())


def answer(output: Any, got: torch.Tensor) -> torch.Tensor:
    """Of what a class returns, the first that is what we return; a single class has no axis of its own there."""
    names = ("logits", "text_embeds", "image_embeds", "pooler_output", "last_hidden_state")
    found = [output[name] for name in names if output.get(name) is not None]
    return next(one.reshape(got.shape) for one in found if one.numel() == got.numel())


def see(mine: Transformer, theirs: torch.nn.Module, draw: torch.Generator) -> Iterator[Answers]:
    pixels = features(draw, 3, 12, 12)
    got = mine(pixels)
    yield "plain", got, answer(theirs(pixel_values=pixels), got)


def read(row: Row, mine: Transformer, theirs: torch.nn.Module, side: str, draw: torch.Generator) -> Iterator[Answers]:
    """Over the real tokens, at once and, where there is a decoder, through the cache."""
    real = mask(TOKENS, side)
    ids = tokens(real, draw, end=row.end)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": real}
    if mine.config.family == "encoder-decoder":
        source, known = ids, real
        if isinstance(mine.config.input, FramesConfig):
            source, known = features(draw, mine.config.input.channels, 2 * mine.config.input.context), None
            given = {"input_features": source}
        real = mask(TARGET, side)
        ids = tokens(real, draw, mine.config.output_input.vocab)
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": real}

        def say(new: torch.Tensor, here: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return mine(source, new, known, here, cache=cache)

    else:
        assert isinstance(mine.config.input, EmbeddingConfig)
        segments = None
        if mine.config.input.segments > 1:
            segments = given["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=draw)
        if row.places:
            given["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0)

        def say(new: torch.Tensor, here: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return mine(new, attention_mask=here, segments=segments, cache=cache)

    got = say(ids, real)
    wanted = answer(theirs(**given), got)
    chosen = real.bool() if wanted.dim() == 3 else ...
    yield "plain", got[chosen], wanted[chosen]
    if mine.config.decoder is not None and wanted.dim() == 3:
        way, prompt = ("stepped", 1) if side == "none" else ("prompted", PROMPT)
        yield way, decode(mine, ids, real, prompt, say)[chosen], wanted[chosen]


def decode(mine: Transformer, ids: torch.Tensor, real: torch.Tensor, prompt: int, say: Any) -> torch.Tensor:
    """A prompt read at once and the rest one token at a time."""
    cache = mine.make_cache(len(PADDING), ids.shape[1], chunk=2)
    lengths = [prompt, *[1] * (ids.shape[1] - prompt)]
    parts = []
    for new, here in zip(ids.split(lengths, 1), real.split(lengths, 1), strict=True):
        parts.append(say(new, here, cache))
        cache.advance(new.shape[1] if bool(real.all()) else here.sum(-1))
    return torch.cat(parts, 1)


def compare(row: Row, mine: Transformer, theirs: torch.nn.Module) -> Iterator[Answers]:
    """Every way to run the two models."""
    draw = torch.Generator().manual_seed(2)
    if mine.config.family == "vision":
        yield from see(mine, theirs, draw)
        return
    for side in ("none", *row.padded):
        for way, got, wanted in read(row, mine, theirs, side, draw):
            yield way if side == "none" else f"{way} {side}", got, wanted


def run(row: Row, dtype: torch.dtype, folder: Path) -> tuple[list[Answers], Transformer, torch.nn.Module]:
    imported(row)  # before any patch
    with precision(dtype), torch.no_grad():
        theirs = published(row, torch.Generator().manual_seed(1))
    theirs.save_pretrained(folder)
    mine = Transformer.from_pretrained(folder, dtype=dtype).eval()
    with precision(dtype), torch.no_grad():
        return list(compare(row, mine, theirs)), mine, theirs


def reloaded(row: Row, folder: Path, theirs: torch.nn.Module) -> torch.nn.Module:
    """What transformers makes of our folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, row.model).from_pretrained(
            folder, attn_implementation=row.kernel, experts_implementation="eager"
        )


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_a_published_model_comes_in_with_its_logits_and_goes_out_with_its_tensors(name, dtype, tmp_path):
    row = ROWS[name]
    answers, mine, theirs = run(row, dtype, tmp_path / "theirs")
    for way, got, wanted in answers:
        assert got.dtype == wanted.dtype == dtype
        gap = float((got - wanted).abs().max())
        assert gap <= max(TOLERANCE[dtype], row.rounded), f"{way}: {gap:.1e} apart"
        assert torch.equal(got.argmax(-1), wanted.argmax(-1)), f"{way}: another token is the likeliest"
    export_hf(mine, tmp_path / "ours", family=theirs.config.model_type, special=SPECIAL)
    was, now = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert now.keys() == was.keys()
    for key, tensor in was.items():
        assert tensor.dtype == now[key].dtype
        assert torch.equal(tensor, now[key]), key
    if dtype == torch.float32:
        with torch.no_grad():
            _, got, wanted = next(compare(row, mine, reloaded(row, tmp_path / "ours", theirs)))
            gap = float((got - wanted).abs().max())
            assert gap <= TOLERANCE[dtype], f"written by us and read by transformers: {gap:.1e} apart"


HEADED = [name for name, row in ROWS.items() if row.model.endswith(("ForCausalLM", "LMHeadModel"))]
SPEAKING = [name for name in HEADED if not ROWS[name].untie and not ROWS[name].only_tied]


@pytest.mark.parametrize("name", SPEAKING)
def test_a_decoder_tied_the_other_way_comes_in_and_goes_out_too(name, tmp_path):
    """What a row ties is untied, and what it does not is tied; the tensors in the file say which it is."""
    row = ROWS[name]
    usual = imported(row).config_class(**(SPECIAL | row.sizes)).tie_word_embeddings
    row = replace(row, sizes=row.sizes | {"tie_word_embeddings": not usual})
    answers, mine, theirs = run(row, torch.float32, tmp_path / "theirs")
    assert (mine.config.tie == "none") is usual
    for way, got, wanted in answers:
        assert float((got - wanted).abs().max()) <= TOLERANCE[torch.float32], way
    export_hf(mine, tmp_path / "ours", family=theirs.config.model_type, special=SPECIAL)
    was, now = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert now.keys() == was.keys()
    assert all(torch.equal(tensor, now[key]) for key, tensor in was.items())


def test_the_table_holds_what_the_rows_compare():
    tried = {imported(row).config_class.model_type for row in ROWS.values()}
    assert tried == set(FAMILIES)
    assert len(tried) >= 45


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"{'':26}{'greatest':>9}{'fp32':>10}{'fp64':>10}   the way that differs most in fp32")
    for name, row in ROWS.items():
        gaps = {}
        for dtype in TOLERANCE:
            with tempfile.TemporaryDirectory() as folder:
                answers, _, _ = run(row, dtype, Path(folder))
            gaps[dtype] = {way: float((got - wanted).abs().max()) for way, got, wanted in answers}
        single, double = gaps.values()
        size = max(float(wanted.abs().max()) for _, _, wanted in answers)
        worst = max(single, key=single.__getitem__)
        print(f"{name:26}{size:9.1f}{single[worst]:10.1e}{max(double.values()):10.1e}   {worst}")


if __name__ == "__main__":
    main()
