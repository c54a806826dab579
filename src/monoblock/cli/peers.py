"""Whoever can continue a text with the same weights, each as a runner: this package and the peers that are installed.

A runner reads prompts and says so many tokens greedily, with no token that ends a text.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monoblock.errors import MonoblockError
from monoblock.model import Transformer

Run = Callable[[list[list[int]], int], Any]


class Runner(NamedTuple):
    run: Run
    bytes: int  # of the weights


class Absent(Exception):
    """Why a peer does not run here, in a few words."""


class Bench(NamedTuple):
    """What the runners are made from: the model, and the same as a folder that transformers reads."""

    model: Transformer
    folder: Path
    device: str
    threads: int

    @property
    def both(self) -> bool:
        return self.model.encoder is not None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype


# -- this package -----------------------------------------------------------------------------------------------------


def ours(given: Bench, bits: int | None = None, draft: str | None = None) -> Runner:
    model = given.model
    if draft is not None and (model.config.quantize is not None or given.device != "cpu"):
        raise Absent("for a model on a CPU that is not quantised")
    if bits is not None:
        from monoblock.quantize.convert import quantized

        if model.config.quantize is not None:
            raise Absent("the model is quantised already")
        model = quantized(model, bits=bits).eval()
    device = given.device

    def run(ids: list[list[int]], new: int) -> Any:
        return model.generate(torch.tensor(ids, device=device), max_new_tokens=new, draft=draft)

    return Runner(run, weights(model))


def weights(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


# -- peers ------------------------------------------------------------------------------------------------------------


def exported(model: Transformer, folder: Path) -> str | None:
    """Write the model for transformers, with a tokenizer of made-up words; why not, where that cannot be."""
    from monoblock.interop.hf import export_hf

    if model.config.quantize is not None:
        return "it is quantised in our own way"
    try:
        export_hf(model, folder, special={"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    except MonoblockError as problem:
        return str(problem)
    size = max(part.vocab for part in model.config.inputs.values() if hasattr(part, "vocab"))
    vocabulary = {f"t{number}": number for number in range(size)}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    empty = dict.fromkeys(("normalizer", "post_processor", "decoder", "truncation", "padding"))
    split = {"type": "WhitespaceSplit"}
    data: dict[str, Any] = {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": words, **empty}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return None


def _installed(package: str) -> None:
    if find_spec(package) is None:
        raise Absent("not installed")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of the peers, which are about other things than time."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def of_transformers(given: Bench, cache: str | None = None) -> Runner:
    _installed("transformers")
    with quiet():
        import transformers

        kind = transformers.AutoModelForSeq2SeqLM if given.both else transformers.AutoModelForCausalLM
        model: Any = kind.from_pretrained(given.folder, dtype=given.dtype)
        model = model.to(given.device).eval()
    model.generation_config.eos_token_id = None
    more = {} if cache is None else {"cache_implementation": cache}

    @torch.inference_mode()
    def run(ids: list[list[int]], new: int) -> Any:
        prompt = torch.tensor(ids, device=given.device)
        with quiet():
            return model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
                **more,
            )

    return Runner(run, weights(model))


def of_ctranslate2(given: Bench, kind: str) -> Runner:
    _installed("ctranslate2")
    _installed("transformers")
    if given.both:
        raise Absent("compared for decoders only")
    if given.dtype != torch.float32:
        raise Absent("compared in fp32 only")
    with quiet():
        ctranslate2: Any = import_module("ctranslate2")
        target = given.folder / f"ctranslate2-{kind}"
        try:
            ctranslate2.converters.TransformersConverter(str(given.folder)).convert(str(target), quantization=kind)
        except (ValueError, KeyError, AttributeError, NotImplementedError) as problem:
            raise Absent(" ".join(str(problem).split())[:60]) from None
    options = {"device": given.device, "compute_type": kind, "inter_threads": 1, "intra_threads": given.threads}
    generator = ctranslate2.Generator(str(target), **options)

    def run(ids: list[list[int]], new: int) -> Any:
        tokens = [[f"t{number}" for number in row] for row in ids]
        lengths = {"max_length": new, "min_length": new}
        return generator.generate_batch(tokens, sampling_topk=1, include_prompt_in_result=False, **lengths)

    return Runner(run, (target / "model.bin").stat().st_size)


def of_llama_cpp(given: Bench, kind: str) -> Runner:
    _installed("llama_cpp")
    if given.both:
        raise Absent("compared for decoders only")
    import numpy as np

    from monoblock.interop.gguf import save_gguf

    llama_cpp: Any = import_module("llama_cpp")
    path = given.folder / f"model-{kind}.gguf"
    try:
        save_gguf(given.model, path, kind=kind)
        threads = {"n_threads": given.threads, "n_threads_batch": given.threads}
        model = llama_cpp.Llama(str(path), n_ctx=given.model.config.context or 4096, **threads, verbose=False)
    except (MonoblockError, ValueError) as problem:
        raise Absent(" ".join(str(problem).split())[:60]) from None

    def best() -> int:
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())

    def run(ids: list[list[int]], new: int) -> Any:
        said = []
        for row in ids:
            model.reset()
            model.eval(row)
            said.append([best()])
            while len(said[-1]) < new:
                model.eval(said[-1][-1:])
                said[-1].append(best())
        return said

    return Runner(run, path.stat().st_size)


# Name -> how the runner is made; what is not about this machine's device says so itself.
RUNNERS: dict[str, Callable[[Bench], Runner]] = {
    "monoblock": ours,
    "monoblock, own 8-bit draft": partial(ours, draft="8-bit"),
    "monoblock, 8 bits": partial(ours, bits=8),
    "monoblock, 4 bits": partial(ours, bits=4),
    "transformers": of_transformers,
    "transformers, static cache": partial(of_transformers, cache="static"),
    "CTranslate2, fp32": partial(of_ctranslate2, kind="float32"),
    "CTranslate2, int8": partial(of_ctranslate2, kind="int8"),
    "llama.cpp, f32": partial(of_llama_cpp, kind="f32"),
    "llama.cpp, q8_0": partial(of_llama_cpp, kind="q8_0"),
}
PLAIN = [name for name in RUNNERS if name != "transformers, static cache"]  # that one compiles for a minute
