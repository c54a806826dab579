"""The certificate of a conversion: how far our logits are from those of the library that the weights came from.

Both models read the same ids: as they are, with padding, and, where there is a decoder, ours once more
token by token with its cache; in fp32 and in fp64. Where the library is not installed, nothing is claimed.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from monoblock.config import EmbeddingConfig, FramesConfig, PatchConfig
from monoblock.interop.convert import Source
from monoblock.interop.folder import CONFIG, load_model
from monoblock.interop.safely import INDEX, open_weights
from monoblock.untrusted import inside, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from monoblock.model import Transformer

ROWS, PLACES, PADDED, CHUNK = 2, 11, 3, 4
CODE = ("auto_map", "custom_pipelines", "attn_implementation", "quantization_config")
LARGEST = 2_000_000_000  # parameters of a model of which two copies in fp64 are made


class Certificate(NamedTuple):
    family: str
    parameters: int
    tensors: int
    max_logit_difference: dict[str, float] | None


def certify(source: Source, written: str | Path, form: str, say: Callable[[str], None]) -> Certificate:
    """Compare with what transformers makes of the source and of what was written, where they are in its form.

    What keeps it from answering is said, and no difference claimed: the conversion itself is done.
    """
    model = source.model
    kind = _family(source, Path(written) if form == "hf" else None)
    folders = [source.folder] if source.kind in ("hf", "gguf") else []
    if form == "hf" or (form == "gguf" and _installed(gguf=True)):
        folders.append(Path(written))
    elif form == "gguf":
        say("transformers reads no GGUF here (pip install gguf accelerate), so the file written is not compared")
    count = sum(weight.numel() for weight in model.parameters())
    found = None
    if not folders or not _installed(gguf=source.kind == "gguf"):
        say("no reference library reads this form here, so no difference of logits is claimed")
    elif count > LARGEST:
        say(f"{count:,} parameters are too many to compare twice, so no difference of logits is claimed")
    else:
        try:
            found = _largest([differences(source.folder, folder) for folder in folders])
        except Exception as problem:  # a stranger's library, which knows other versions and other limits
            said = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
            say(f"transformers gives no answer ({said}), so no difference of logits is claimed")
    return Certificate(kind, count, len(model.state_dict()), found)


def _largest(found: list[dict[str, float]]) -> dict[str, float]:
    return {way: max(one[way] for one in found) for way in found[0]}


def _family(source: Source, written: Path | None) -> str:
    """The published family of the source or, where that is ours, of what was written."""
    if source.kind == "gguf":
        from monoblock.tokenizers.gguf_header import read_head

        return str(read_head(source.folder).fields["general.architecture"])
    if source.kind == "hf":
        return str(read_json(inside(source.folder, CONFIG))["model_type"])
    if written is not None:
        return str(read_json(inside(written, CONFIG))["model_type"])
    return source.model.config.family


def _installed(*, gguf: bool) -> bool:
    """Whether the library can be asked; it reads GGUF by way of another one."""
    return all(find_spec(name) for name in (*(("accelerate",) if gguf else ()), "transformers"))


def differences(source: Path, folder: Path) -> dict[str, float]:
    """The largest differences between our model of `source` and theirs of `folder`, by way of reading and format."""
    from monoblock.model import Transformer

    found: dict[str, float] = {}
    theirs = reference(folder)
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        ours = load_model(Transformer, source, dtype=dtype).eval()
        with torch.no_grad(), quiet(), precision(dtype):
            if dtype == torch.float64:  # built anew, so that its angles are of that precision too
                weights, theirs.config.dtype = theirs.state_dict(), dtype
                theirs = type(theirs)(theirs.config).eval()
                made = set(theirs._keys_to_ignore_on_save or ())  # tables that are computed, not stored
                theirs.load_state_dict({key: weights[key] for key in weights if key not in made}, strict=not made)
            found |= {f"{name}_{way}": value for way, value in compare(ours, theirs).items()}
        del ours
    return found


def reference(folder: Path) -> Any:
    """The library's own model of a folder whose every field our reader has accepted; no code of the folder is run."""
    import transformers

    with quiet(), tempfile.TemporaryDirectory(prefix="monoblock-") as copy:
        if folder.is_file():
            cls, place = transformers.AutoModelForCausalLM, folder.parent
            more: dict[str, Any] = {"gguf_file": folder.name}
        else:
            from monoblock.interop.hf import find_family

            given = read_json(inside(folder, CONFIG))
            cls = getattr(transformers, find_family(given)[1])
            place, more = _plain_copy(folder, given, copy), {"use_safetensors": True}
        model: Any = cls.from_pretrained(
            place, local_files_only=True, trust_remote_code=False, dtype=torch.float32, **more
        )
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # its grouped kernel wants even sizes
    return model.eval()


def _plain_copy(folder: Path, given: dict[str, Any], copy: str) -> Path:
    """The folder with nothing but its weights and the fields of its configuration that name no code to run."""
    plain = {key: value for key, value in given.items() if not key.startswith("_") and key not in CODE}
    (Path(copy) / CONFIG).write_text(json.dumps(plain))
    for path in [*dict.fromkeys(open_weights(folder).file_of.values()), *Path(folder).glob(INDEX)]:
        (Path(copy) / path.name).symlink_to(path.resolve())
    return Path(copy)


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """In fp64, both sides do in fp64 what they do in fp32 whatever their weights are: norms, softmax, angles."""
    before = torch.get_default_dtype(), torch.float32, torch.float, torch.Tensor.float, torch.FloatTensor
    try:
        torch.set_default_dtype(dtype)
        if dtype == torch.float64:
            torch.float32 = torch.float = dtype
            torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
            torch.FloatTensor = torch.DoubleTensor  # type: ignore[misc, assignment]
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float, torch.FloatTensor = before[1:]  # type: ignore
        torch.set_default_dtype(before[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's bars and warnings."""
    import transformers

    bars = transformers.utils.logging.is_progress_bar_enabled()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare(ours: Transformer, theirs: Any) -> dict[str, float]:
    """Way of reading -> largest difference, over the places that hold real tokens."""
    given = ours.config.input
    if isinstance(given, PatchConfig):
        pixels = _drawn(ours, given.channels, given.image, given.image)
        return {"plain": _apart(ours(pixels), theirs(pixel_values=pixels))}
    if isinstance(given, FramesConfig):
        return _heard(ours, theirs, _drawn(ours, given.channels, 2 * given.context))
    assert isinstance(given, EmbeddingConfig)
    length = min(PLACES, given.context or PLACES)
    ids = torch.randint(given.vocab, (ROWS, length), generator=torch.Generator().manual_seed(1))
    end = getattr(theirs.config, "eos_token_id", None)
    if isinstance(end, int) and ours.config.family == "decoder-only" and ours(ids).dim() == 2:
        ids = _ended(ids, end)
    mask = torch.ones_like(ids)
    # On the left where text is continued; an encoder's library counts places from the first, be it padding.
    padded = slice(0, PADDED) if ours.config.family == "decoder-only" else slice(length - PADDED, length)
    mask[1, padded] = 0
    if ours.config.family == "encoder-decoder":
        return _both(ours, theirs, ids, mask)
    found = {
        "plain": _apart(ours(ids), theirs(input_ids=ids)),
        "padded": _apart(ours(ids, mask), theirs(input_ids=ids, attention_mask=mask, **_places(theirs, mask)), mask),
    }
    if ours.config.family == "decoder-only" and ours(ids).dim() == 3:
        cache = ours.make_cache(ROWS, length)
        parts = []
        for part in (*ids[:, :CHUNK].split(CHUNK, 1), *ids[:, CHUNK:].split(1, 1)):
            parts.append(ours(part, cache=cache))
            cache.advance(torch.full((ROWS,), part.shape[1]))
        found["cached"] = _apart(torch.cat(parts, 1), theirs(input_ids=ids))
    return found


def _ended(ids: Tensor, end: int) -> Tensor:
    """With the id that ends a text at the end and nowhere else: where it stands, some classes take their answer."""
    ids = ids.masked_fill(ids == end, 0 if end else 1)
    ids[:, -1] = end
    return ids


def _both(ours: Transformer, theirs: Any, ids: Tensor, mask: Tensor) -> dict[str, float]:
    target = ids.flip(1)[:, :-2]
    found = {
        "plain": _apart(ours(ids, target), theirs(input_ids=ids, decoder_input_ids=target)),
        "padded": _apart(ours(ids, target, mask), theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=target)),
    }
    found["cached"] = _apart(_stepped(ours, ids, target), theirs(input_ids=ids, decoder_input_ids=target))
    return found


def _heard(ours: Transformer, theirs: Any, frames: Tensor) -> dict[str, float]:
    """Features have no padding: the whole is heard."""
    said = ours.config.output_input
    assert isinstance(said, EmbeddingConfig)
    target = torch.randint(said.vocab, (ROWS, PLACES), generator=torch.Generator().manual_seed(1))
    answer = theirs(input_features=frames, decoder_input_ids=target)
    return {"plain": _apart(ours(frames, target), answer), "cached": _apart(_stepped(ours, frames, target), answer)}


def _stepped(ours: Transformer, source: Tensor, target: Tensor) -> Tensor:
    """The target one token at a time, through the cache."""
    memory, cache = ours.encode(source), ours.make_cache(ROWS, target.shape[1])
    parts = []
    for place, part in enumerate(target.split(1, 1)):
        parts.append(ours.decode(part, memory if place == 0 else None, cache=cache))
        cache.advance(torch.ones(ROWS, dtype=torch.long))
    return torch.cat(parts, 1)


def _drawn(ours: Transformer, *shape: int) -> Tensor:
    """Numbers that stand for a picture or for sound, the same in every format."""
    drawn = torch.rand(ROWS, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.to(next(ours.parameters()).dtype)


def _places(theirs: Any, mask: Tensor) -> dict[str, Tensor]:
    """Real tokens are counted from 0 in our models; what a library's model takes from outside must say the same."""
    import inspect

    takes = "position_ids" in inspect.signature(theirs.forward).parameters
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if takes else {}


def _apart(ours: Tensor, theirs: Any, mask: Tensor | None = None) -> float:
    """The largest difference from the first of their answers that is of our size; one class has no axis of its own."""
    names = ("logits", "text_embeds", "image_embeds", "pooler_output", "last_hidden_state")
    answers = [found for name in names if (found := getattr(theirs, name, None)) is not None]
    other = next(found for found in answers if found.numel() == ours.numel())
    apart = (ours - other.reshape(ours.shape)).abs()
    if mask is not None and apart.dim() == 3:
        apart = apart[mask.bool()]
    return float(apart.max())
