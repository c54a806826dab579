"""Time the generation of text with the same weights, in this package and in other libraries.

A runner takes B prompts of token ids and the number of new tokens. It decodes greedily and does not stop at an
end-of-sequence token.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monoblock.accounting.report import account
from monoblock.errors import MonoblockError
from monoblock.inference.optimized import optimize
from monoblock.interop.model_folder import DTYPE_NAMES
from monoblock.model import Transformer

Progress = Callable[[str], None]
RunFunction = Callable[[list[list[int]], int], Any]


class Runner(NamedTuple):
    run: RunFunction
    weight_bytes: int


class RunnerUnavailable(Exception):
    """Raised when a runner cannot run with this model or on this machine; the message is the reason."""


class BenchSetup(NamedTuple):
    """What a runner is built from: the model, the folder of its Hugging Face export, the device and the CPU threads."""

    model: Transformer
    folder: Path
    device: str
    threads: int

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.model.parameters())).dtype


# -- this package -----------------------------------------------------------------------------------------------------


def monoblock_runner(
    setup: BenchSetup, bits: int | None = None, draft: str | None = None, activation_bits: int = 16
) -> Runner:
    model = setup.model
    if draft is not None and (model.config.quantize is not None or setup.device != "cpu"):
        raise RunnerUnavailable("it needs a CPU and a model that is not quantized")
    if bits is not None:
        from monoblock.quantization.convert import quantize

        if model.config.quantize is not None:
            raise RunnerUnavailable("the model is already quantized")
        model = quantize(model, bits=bits, activation_bits=activation_bits).eval()
    fast, device = optimize(model), setup.device

    def run(ids: list[list[int]], new: int) -> Any:
        return fast.generate(torch.tensor(ids, device=device), max_new_tokens=new, draft=draft)

    return Runner(run, count_weight_bytes(model))


def count_weight_bytes(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


# -- other libraries ---------------------------------------------------------------------------------------------------


def export_for_peers(model: Transformer, folder: Path) -> str | None:
    """Export a model to a Hugging Face folder with a placeholder tokenizer; return None, or why it failed."""
    from monoblock.interop.huggingface.export import export_hf

    if model.config.quantize is not None:
        return "a quantized model cannot be exported to other libraries"
    try:
        export_hf(model, folder, special_token_ids={"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    except MonoblockError as problem:
        return str(problem)
    size = max(part.vocab for part in model.config.inputs.values() if hasattr(part, "vocab"))
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {f"t{index}": index for index in range(size)}, "unk_token": "t0"},
        **dict.fromkeys(("normalizer", "post_processor", "decoder", "truncation", "padding")),
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return None


def _check_peer(setup: BenchSetup, *packages: str, only_decoders: bool = True) -> None:
    if not all(map(find_spec, packages)):
        raise RunnerUnavailable("not installed")
    if only_decoders and setup.model.encoder is not None:
        raise RunnerUnavailable("only decoder-only models are compared")


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers, which would disturb the timing."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def transformers_runner(setup: BenchSetup, cache: str | None = None) -> Runner:
    _check_peer(setup, "transformers", only_decoders=False)
    with silence_transformers():
        import transformers

        is_pair = setup.model.encoder is not None
        auto_class = transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM
        model: Any = auto_class.from_pretrained(setup.folder, dtype=setup.dtype)
        model = model.to(setup.device).eval()
    model.generation_config.eos_token_id = None
    cache_options = {} if cache is None else {"cache_implementation": cache}

    @torch.inference_mode()
    def run(ids: list[list[int]], new: int) -> Any:
        prompt = torch.tensor(ids, device=setup.device)
        with silence_transformers():
            return model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
                **cache_options,
            )

    return Runner(run, count_weight_bytes(model))


def ctranslate2_runner(setup: BenchSetup, kind: str) -> Runner:
    _check_peer(setup, "ctranslate2", "transformers")
    if setup.dtype != torch.float32:
        raise RunnerUnavailable("only fp32 models are compared")
    with silence_transformers():
        ctranslate2: Any = import_module("ctranslate2")
        target = setup.folder / f"ctranslate2-{kind}"
        try:
            ctranslate2.converters.TransformersConverter(str(setup.folder)).convert(str(target), quantization=kind)
        except (ValueError, KeyError, AttributeError, NotImplementedError) as problem:
            raise RunnerUnavailable(" ".join(str(problem).split())[:60]) from None
    options = {"device": setup.device, "compute_type": kind, "inter_threads": 1, "intra_threads": setup.threads}
    generator = ctranslate2.Generator(str(target), **options)

    def run(ids: list[list[int]], new: int) -> Any:
        tokens = [[f"t{token}" for token in row] for row in ids]
        lengths = {"max_length": new, "min_length": new}
        return generator.generate_batch(tokens, sampling_topk=1, include_prompt_in_result=False, **lengths)

    return Runner(run, (target / "model.bin").stat().st_size)


def llama_cpp_runner(setup: BenchSetup, kind: str) -> Runner:
    _check_peer(setup, "llama_cpp")
    import numpy as np

    from monoblock.interop.gguf.writer import save_gguf

    llama_cpp: Any = import_module("llama_cpp")
    path = setup.folder / f"model-{kind}.gguf"
    try:
        save_gguf(setup.model, path, kind=kind)
        threads = {"n_threads": setup.threads, "n_threads_batch": setup.threads}
        model = llama_cpp.Llama(str(path), n_ctx=setup.model.config.context or 4096, **threads, verbose=False)
    except (MonoblockError, ValueError) as problem:
        raise RunnerUnavailable(" ".join(str(problem).split())[:60]) from None

    def next_token() -> int:
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())

    def run(ids: list[list[int]], new: int) -> Any:
        outputs = []
        for row in ids:
            model.reset()
            model.eval(row)
            tokens = [next_token()]
            while len(tokens) < new:
                model.eval(tokens[-1:])
                tokens.append(next_token())
            outputs.append(tokens)
        return outputs

    return Runner(run, path.stat().st_size)


# Name -> function that builds the runner, or raises RunnerUnavailable.
RUNNERS: dict[str, Callable[[BenchSetup], Runner]] = {
    "monoblock": monoblock_runner,
    "monoblock, own 8-bit draft": partial(monoblock_runner, draft="8-bit"),
    "monoblock, 8 bits": partial(monoblock_runner, bits=8),
    "monoblock, 4 bits": partial(monoblock_runner, bits=4),
    "monoblock, 8 bits, 8-bit activations": partial(monoblock_runner, bits=8, activation_bits=8),
    "monoblock, 4 bits, 8-bit activations": partial(monoblock_runner, bits=4, activation_bits=8),
    "transformers": transformers_runner,
    "transformers, static cache": partial(transformers_runner, cache="static"),
    "CTranslate2, fp32": partial(ctranslate2_runner, kind="float32"),
    "CTranslate2, int8": partial(ctranslate2_runner, kind="int8"),
    "llama.cpp, f32": partial(llama_cpp_runner, kind="f32"),
    "llama.cpp, q8_0": partial(llama_cpp_runner, kind="q8_0"),
}
DEFAULT_RUNNERS = [name for name in RUNNERS if name != "transformers, static cache"]  # its compilation takes a minute


# -- timing -----------------------------------------------------------------------------------------------------------


def measure_runners(
    model: Transformer,
    folder: Path,
    names: list[str],
    prompt: int,
    new: int,
    batch: int,
    rounds: int,
    prompts: list[list[list[int]]] | None = None,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Time the named runners and return the report as `--json` prints it.

    folder: the folder to which the model is exported, for other libraries to load.
    prompt, new: the number of tokens in a prompt, and the number of tokens to generate.
    prompts: batches of token ids, of which each round uses the next; None uses one random batch (batch, prompt).
    progress: called with a line before each step.
    """
    parameter = next(iter(model.parameters()))
    device, is_gpu = parameter.device, parameter.device.type == "cuda"
    setup = BenchSetup(model, folder, str(device), torch.get_num_threads())
    absent: dict[str, str] = {}  # the reasons why runners could not be measured

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RunnerUnavailable as problem:
            absent[name] = str(problem)
        except Exception as problem:
            if name.startswith("monoblock"):
                raise
            absent[name] = f"failed with {type(problem).__name__}: {' '.join(str(problem).split())[:200]}"

    peers = [name for name in names if not name.startswith("monoblock")]
    export_problem = export_for_peers(model, folder) if peers else None
    runners: dict[str, Runner] = {}
    for name in names:
        if name in peers and export_problem is not None:
            absent[name] = export_problem
            continue
        progress(f"preparing {name}")
        if (runner := attempt(name, partial(RUNNERS[name], setup))) is not None:
            runners[name] = runner
    vocabulary = min(part.vocab for part in model.config.inputs.values() if hasattr(part, "vocab"))
    random_batch = torch.randint(1, vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = prompts or [random_batch]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    peaks: dict[str, int | None] = {}
    # The runners take turns within a round, so that a change in the load of the machine affects all of them.
    for round_number in range(rounds + 1):
        progress("warming up" if not round_number else f"round {round_number} of {rounds}")
        for name in [name for name in runners if name not in absent]:
            if is_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            ids = prompts[round_number % len(prompts)]
            times = attempt(name, partial(_time_first_and_all, runners[name], ids, new, is_gpu))
            peaks[name] = torch.cuda.max_memory_allocated(device) if is_gpu else None
            if round_number and times is not None:
                seconds[name].append(times)
    rows = {}
    for name, runner in runners.items():
        if name not in absent:
            first, total = map(statistics.median, zip(*seconds[name], strict=True))
            rows[name] = {
                "prefill_tokens_per_second": prompt * batch / first,
                # None: too short to measure
                "decode_tokens_per_second": new * batch / (total - first) if total > first else None,
                "seconds_first": first,
                "seconds_all": total,
                "weight_bytes": runner.weight_bytes,
                "peak_bytes": peaks[name],  # of a GPU
            }
    dtype = str(parameter.dtype).removeprefix("torch.")
    short_dtype = next(short for short, name in DTYPE_NAMES.items() if name == dtype)
    return {
        "device": setup.device,
        "dtype": dtype,
        "threads": setup.threads,
        "torch": torch.__version__,
        "prompt": prompt,
        "new": new,
        "batch": batch,
        "rounds": rounds,
        "kv_cache_bytes": account(model.config).kv_cache_bytes(batch, prompt + new, short_dtype),
        "runners": rows,
        "absent": absent,
    }


def _time_first_and_all(runner: Runner, prompts: list[list[int]], new: int, is_gpu: bool) -> tuple[float, float]:
    """Return the seconds to the first token, and to `new` more."""
    seconds = []
    for count in (1, new + 1):
        start = time.perf_counter()
        runner.run(prompts, count)
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]
