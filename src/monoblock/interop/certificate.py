"""Compare a converted model with the same model in transformers: report the largest difference between their logits.

Both models run the same inputs, with and without padding, in fp32 and in fp64; our decoders also run them token by
token with a key/value cache.  If transformers is not installed, no difference is reported.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import warnings
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from monoblock.config.model import EmbeddingConfig, FramesConfig, PatchConfig
from monoblock.errors import MonoblockError
from monoblock.interop.convert import SourceModel, read_model_type
from monoblock.interop.model_folder import CONFIG_FILE, ModelFolder, load_model, vocab_size
from monoblock.interop.weights import INDEX_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from monoblock.nn.transformer import Transformer

BATCH_SIZE, SEQUENCE_LENGTH, PADDING_LENGTH, CHUNK_LENGTH = 2, 11, 3, 4
EXCLUDED_FIELDS = ("auto_map", "custom_pipelines", "attn_implementation", "quantization_config")
MAX_FP64_DIFFERENCE = 1e-4  # that rounding explains; weights stored in 16 bits are the same on both sides
MAX_PARAMETERS = 2_000_000_000  # above this, two copies in fp64 need too much memory


class Certificate(NamedTuple):
    family: str
    parameters: int
    tensors: int
    max_logit_difference: dict[str, float] | None


def certify(
    source: SourceModel,
    output_path: str | Path,
    model_format: str,
    log: Callable[[str], None],
    *,
    dtype: str | None = None,
) -> Certificate:
    """Compare our model with the models that transformers loads from the source and from the converted output.

    A GGUF file is also read again by us, and compared with the source: transformers does not read all that such a file
    can say.

    model_format: the format of the output: monoblock, hf or gguf.
    dtype: the type to which the weights of the output were rounded.
    If transformers cannot load them, log the reason and report no difference; the conversion itself is not affected.
    """
    output, parameters = ModelFolder(output_path), sum(weight.numel() for weight in source.model.parameters())
    if source.folder.format == "gguf":
        family = str(source.folder.gguf.fields["general.architecture"])
    elif "hf" in (source.folder.format, model_format):
        family = read_model_type(source.folder if source.folder.format == "hf" else output)
    else:
        family = source.model.config.family
    certificate = Certificate(family, parameters, len(source.model.state_dict()), None)
    if parameters > MAX_PARAMETERS:
        log(f"{parameters:,} parameters are too many to compare in memory, so no difference of logits is reported")
        return certificate
    by_us, by_transformers = list[dict[str, float]](), list[dict[str, float]]()
    if model_format == "gguf":
        by_us.append(logit_differences(source.folder, output, read_by_us=True))
    if dtype is not None:
        rounding = _largest([logit_differences(source.folder, output, read_by_us=True)])
        if rounding > 0:
            log(f"the weights were rounded to {dtype}, which changes the logits by up to {rounding:.2g}")
    pairs = [(source.folder, source.folder)] if source.folder.format in ("hf", "gguf") else []
    pairs += [(source.folder if dtype is None else output, output)] if model_format in ("hf", "gguf") else []
    for ours, theirs in pairs:
        reason = _reason_not_to_read(theirs)
        if reason is None:
            try:
                by_transformers.append(logit_differences(ours, theirs))
            except Exception as error:  # transformers may fail in many ways, depending on its version
                reason = f"failed ({' '.join(f'{type(error).__name__}: {error}'.split())[:200]})"
        if reason is not None:
            log(f"transformers {reason}, so {theirs.path} is not compared with it")
    differences = by_us + by_transformers
    if not differences:
        log("transformers is not installed or cannot read these formats, so no difference of logits is reported")
        return certificate
    if not by_transformers:
        log("the file was read again by monoblock, and compared with the source")
    if "gguf" not in (model_format, source.folder.format) and (worst := _largest(differences)) > MAX_FP64_DIFFERENCE:
        log(f"warning: the logits differ from those of transformers by up to {worst:.2g}, which is more than rounding")
    largest = {name: max(row[name] for row in differences) for name in differences[0]}
    return certificate._replace(max_logit_difference=largest)


def _reason_not_to_read(folder: ModelFolder) -> str | None:
    """Return why transformers cannot be a reference for a file or folder, or None."""
    if not find_spec("transformers"):
        return "is not installed"
    if not folder.is_gguf:
        return None
    if not all(find_spec(name) for name in ("accelerate", "gguf")):
        return "cannot read GGUF here (pip install gguf accelerate)"
    return "ignores the rotary factors of a GGUF file" if "rope_freqs.weight" in folder.gguf.tensors else None


def _largest(differences: list[dict[str, float]]) -> float:
    """Return the largest difference in fp64, which is not rounding."""
    return max((value for row in differences for name, value in row.items() if name.startswith("fp64")), default=0.0)


def logit_differences(source: ModelFolder, folder: ModelFolder, *, read_by_us: bool = False) -> dict[str, float]:
    """Return the largest logit differences between our model from `source` and the transformers model from `folder`.

    The keys are dtype and mode, such as "fp32_padded".  With `read_by_us`, the reference is our own model from
    `folder`.
    """
    from monoblock.nn.transformer import Transformer

    differences: dict[str, float] = {}
    theirs: Any = None if read_by_us else load_reference(folder)
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        ours = load_model(Transformer, source, dtype=dtype).eval()
        if read_by_us:
            theirs = _Reference(load_model(Transformer, folder, dtype=dtype).eval())
        with torch.no_grad(), silence_transformers(), force_dtype(dtype):
            if name == "fp64" and not read_by_us:  # built again, so that rotary frequencies are in fp64 too
                weights, theirs.config.dtype = theirs.state_dict(), dtype
                theirs = type(theirs)(theirs.config).eval()
                computed = set(theirs._keys_to_ignore_on_save or ())  # tables that are computed, not stored
                stored = {key: weight for key, weight in weights.items() if key not in computed}
                theirs.load_state_dict(stored, strict=not computed)
            differences |= {f"{name}_{mode}": value for mode, value in compare_logits(ours, theirs).items()}
    return differences


class _Reference:
    """A model of ours, called by the names that transformers has for inputs and outputs."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.config = model, SimpleNamespace()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        input_features: Tensor | None = None,
    ) -> Any:
        source = next(given for given in (input_ids, pixel_values, input_features) if given is not None)
        return SimpleNamespace(logits=self.model(source, decoder_input_ids, attention_mask=attention_mask))

    __call__ = forward


def load_reference(folder: ModelFolder) -> Any:
    """Load a folder or GGUF file with transformers, without running any code from the folder."""
    import transformers

    with silence_transformers(), tempfile.TemporaryDirectory(prefix="monoblock-") as copy:
        if folder.is_gguf:
            cls, path = transformers.AutoModelForCausalLM, folder.path.parent
            options: dict[str, Any] = {"gguf_file": folder.path.name}
            options["config"] = _read_gguf_config(folder)
        else:
            from monoblock.interop.huggingface.load import find_family

            cls = getattr(transformers, find_family(folder.fields)[1])
            path, options = _copy_without_code(folder, Path(copy)), {"use_safetensors": True}
            with suppress(MonoblockError):  # of a field that the user had ignored
                blocks = [block for stack in folder.config.stacks.values() for block in stack.layers()]  # type: ignore[union-attr]
                if any(block.attention is not None and block.attention.softcap for block in blocks):
                    options["attn_implementation"] = "eager"  # the fused kernels do not limit scores
        model: Any = cls.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, dtype=torch.float32, **options
        )
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the grouped kernel supports even sizes only
    return model.eval()


def _read_gguf_config(folder: ModelFolder) -> Any:
    """Read the configuration of a GGUF file with transformers, and correct what it takes from elsewhere.

    It counts the tokens of the tokenizer, which may be missing, gives every GPT-2 a context of 1024, and every Qwen 3
    heads of size 128.
    """
    import transformers

    ours: Any = folder.config
    config = transformers.AutoConfig.from_pretrained(folder.path.parent, gguf_file=folder.path.name)
    config.vocab_size = vocab_size(ours)
    if hasattr(config, "n_positions") and ours.context is not None:
        config.n_positions = ours.context
    attention = next(ours.decoder.layers()).attention if ours.decoder is not None else None
    if hasattr(config, "head_dim") and attention is not None:
        config.head_dim = attention.key_size(ours.width)
    return config


def _copy_without_code(folder: ModelFolder, copy: Path) -> Path:
    """Link the weights into the folder `copy`, and write config.json there without the fields that load custom code."""
    safe = {name: x for name, x in folder.fields.items() if not name.startswith("_") and name not in EXCLUDED_FIELDS}
    (copy / CONFIG_FILE).write_text(json.dumps(safe))
    for path in [*dict.fromkeys(folder.weights.file_of.values()), *folder.path.glob(INDEX_FILE)]:
        (copy / path.name).symlink_to(path.resolve())
    return copy


@contextmanager
def force_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside a `with` block.

    For fp64, torch.float32 is replaced too, so that norms and rotary angles are also computed in fp64.
    """
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
def silence_transformers() -> Iterator[None]:
    """Hide the progress bars and warnings of transformers."""
    if not find_spec("transformers"):
        yield
        return
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


# -- comparison --------------------------------------------------------------------------------------------------------


def compare_logits(ours: Transformer, theirs: Any) -> dict[str, float]:
    """Return the largest logit difference over valid tokens in each mode: "plain", "padded" and "cached"."""
    config = ours.config.input
    if isinstance(config, PatchConfig):
        pixels = _random_inputs(ours, config.channels, config.image, config.image)
        return {"plain": _max_difference(ours(pixels), theirs(pixel_values=pixels))}
    if isinstance(config, FramesConfig):
        target = ours.config.target_input
        assert isinstance(target, EmbeddingConfig)
        frames = _random_inputs(ours, config.channels, 2 * config.context)  # the whole context, so there is no padding
        ids = _random_ids(target.vocab, SEQUENCE_LENGTH)
        return _compare_encoder_decoder(ours, theirs, {"input_features": frames}, ids, None)
    assert isinstance(config, EmbeddingConfig)
    is_decoder = ours.config.family == "decoder-only"
    length = min(SEQUENCE_LENGTH, config.context or SEQUENCE_LENGTH)
    ids = _random_ids(config.vocab, length)
    eos_id = getattr(theirs.config, "eos_token_id", None)
    if isinstance(eos_id, int) and is_decoder and ours(ids).dim() == 2:  # some classifiers pool at the end token
        ids = ids.masked_fill(ids == eos_id, 0 if eos_id else 1)
        ids[:, -1] = eos_id
    mask = torch.ones_like(ids)
    # Decoders are padded on the left, encoders on the right: transformers counts their positions from the first token.
    mask[1, slice(0, PADDING_LENGTH) if is_decoder else slice(length - PADDING_LENGTH, length)] = 0
    if ours.config.family == "encoder-decoder":
        return _compare_encoder_decoder(ours, theirs, {"input_ids": ids}, ids.flip(1)[:, :-2], mask)
    # Some encoders of transformers count positions after the padding id, and skip this id wherever it occurs.
    first = 0 if is_decoder else getattr(config.positions, "offset", 0)
    plain = theirs(input_ids=ids, **(_position_ids(theirs, torch.ones_like(mask), first) if first else {}))
    reference = theirs(input_ids=ids, attention_mask=mask, **_position_ids(theirs, mask, first))
    differences = {
        "plain": _max_difference(ours(ids), plain),
        "padded": _max_difference(ours(ids, mask), reference, mask),
    }
    if is_decoder and ours(ids).dim() == 3:
        cache = ours.make_cache(BATCH_SIZE, length)
        logits = []
        for chunk in (*ids[:, :CHUNK_LENGTH].split(CHUNK_LENGTH, 1), *ids[:, CHUNK_LENGTH:].split(1, 1)):
            logits.append(ours(chunk, cache=cache))
            cache.advance(torch.full((BATCH_SIZE,), chunk.shape[1]))
        differences["cached"] = _max_difference(torch.cat(logits, 1), plain)
    return differences


def _compare_encoder_decoder(
    ours: Transformer, theirs: Any, source: dict[str, Tensor], target: Tensor, mask: Tensor | None
) -> dict[str, float]:
    """Compare for a source, given by its name in transformers, and a target (B, T) of token ids."""
    (inputs,) = source.values()
    plain = theirs(**source, decoder_input_ids=target)
    differences = {"plain": _max_difference(ours(inputs, target), plain)}
    if mask is not None:
        padded = theirs(**source, attention_mask=mask, decoder_input_ids=target)
        differences["padded"] = _max_difference(ours(inputs, target, mask), padded)
    memory, cache = ours.encode(inputs), ours.make_cache(BATCH_SIZE, target.shape[1])
    logits = []
    for step, token in enumerate(target.split(1, 1)):
        logits.append(ours.decode(token, memory if step == 0 else None, cache=cache))
        cache.advance(torch.ones(BATCH_SIZE, dtype=torch.long))
    return differences | {"cached": _max_difference(torch.cat(logits, 1), plain)}


def _random_ids(vocab: int, length: int) -> Tensor:
    return torch.randint(vocab, (BATCH_SIZE, length), generator=torch.Generator().manual_seed(1))


def _random_inputs(ours: Transformer, *shape: int) -> Tensor:
    """Return random pixels or audio frames in the model's dtype; the numbers are the same for every dtype."""
    inputs = torch.rand(BATCH_SIZE, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs.to(next(iter(ours.parameters())).dtype)


def _position_ids(theirs: Any, mask: Tensor, first: int) -> dict[str, Tensor]:
    """Return position_ids that count valid tokens from `first`; {} if the model takes no position_ids."""
    accepts = "position_ids" in inspect.signature(theirs.forward).parameters
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0) + first} if accepts else {}


def _max_difference(ours: Tensor, theirs: Any, mask: Tensor | None = None) -> float:
    """Return the largest absolute difference between our output and the matching output of transformers.

    This is its first output with the same number of elements; a binary classifier in transformers has no last axis.
    """
    names = ("logits", "text_embeds", "image_embeds", "pooler_output", "last_hidden_state")
    outputs = [output for name in names if (output := getattr(theirs, name, None)) is not None]
    reference = next(output for output in outputs if output.numel() == ours.numel())
    difference = (ours - reference.reshape(ours.shape)).abs()
    if mask is not None and difference.dim() == 3:
        difference = difference[mask.bool()]
    return float(difference.max())
