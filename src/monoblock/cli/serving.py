"""Models behind OpenAI's API: `serve` them, answer a `batch` of requests, `replay` an answer from its receipt."""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.cli.model_options import ModelVerb, device_option, dtype_option
from monoblock.cli.output import ProgressBar, echo, format_bytes, print_json, print_table
from monoblock.cli.verb import REQUIRED, argument, json_option, option, ray_option
from monoblock.errors import ConfigError, FileError
from monoblock.untrusted_files import read_json

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline
    from monoblock.serving.served_model import ServedModel

PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")  # of the extra [serve]
CHECK_FAILED = 3  # exit code


def require_packages() -> None:
    """Raise ConfigError unless the packages of the extra are installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}; write pip install 'monoblock[serve]'")


def load_models(
    models: tuple[str, ...], device: str | None, dtype: str | None, force: bool, **options: Any
) -> list[ServedModel]:
    """Load models under the names of their folders; MODEL=NAME gives another name."""
    require_packages()
    from monoblock.serving import served_model

    def load(folder: str) -> Pipeline:
        return ModelVerb(model=folder, device=device, dtype=dtype, force=force).load()

    return served_model.load_models(models, load, **options)


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve MODEL, or several, to clients of OpenAI's API on http://127.0.0.1:8000/v1: completions, chat, responses,
    embeddings, translation, classification. A model is called as its folder, or as in MODEL=NAME.

    Every request needs a key. Without --api-key-file, a new one is made and printed.
    """

    model: tuple[str, ...] = argument()
    host: str = option("Address to listen on; one that other machines reach needs --api-key-file.", "127.0.0.1")
    port: int = option("Port to listen on.", 8000, least=1, most=65535)
    api_key_file: Path | None = option("File with one key per line.", path="file", exists=True)
    allow_host: tuple[str, ...] = option("Another name of this server, as in the address of a request.", ())
    exact: bool = option("Compute every answer bit for bit as if its request were alone; slower.", False)
    max_rows: int | None = option("Decode at most N sequences at a time.  [default: 256]", least=1)
    max_queue: int = option("Let at most N requests wait; more are refused with 429.", 256, least=0)
    dry_run: bool = option("Do not serve; say how much memory the models take, and what fits.", False)
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = option("Load the tokenizer of a published model even if it seems to belong to another one.", False)
    as_json: bool = json_option("With --dry-run: print JSON.")

    def run(self) -> None:
        require_packages()
        from monoblock.serving.app import create_app
        from monoblock.serving.process import check_address, log_to_stderr, serve
        from monoblock.serving.security import read_keys

        if not self.model:
            raise ConfigError("serve needs a model; write monoblock serve runs/demo-1")
        if not self.dry_run:
            check_address(self.host, self.port, has_key_file=self.api_key_file is not None)
        keys = [f"mb-{secrets.token_urlsafe(24)}"] if self.api_key_file is None else read_keys(self.api_key_file)
        options = {"exact": self.exact, "max_rows": self.max_rows, "max_queue": self.max_queue}
        models = load_models(self.model, self.device, self.dtype, self.force, **options)
        if self.dry_run:
            rows = [_describe(model) for model in models]
            if self.as_json:
                print_json(rows)
            else:
                _print_plan(rows)
            return
        address = f"http://{'localhost' if self.host == '127.0.0.1' else self.host}:{self.port}"
        for model in models:
            routes = ", ".join(f"/v1/{name}" for name in model.abilities)
            echo(f"{model.name}: {routes}", err=True)
        if self.api_key_file is None:
            echo(f"export OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={keys[0]}", err=True)
            echo(f"Chat in a browser: {address}/#key={keys[0]}", err=True)
        echo(f"Serving on {address} (Ctrl-C ends it)", err=True)
        sys.stderr.flush()
        log_to_stderr()
        serve(create_app(models, keys, (self.host, *self.allow_host)), self.host, self.port)


def _describe(model: ServedModel) -> dict[str, Any]:
    """Return what a model takes of the memory, and what fits."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.pipe.model.state_dict().values())
    about: dict[str, Any] = {"model": model.name, "weights_bytes": weights, "routes": model.abilities}
    if model.decodes:
        from monoblock.nn.paged_cache import token_bytes

        engine, decoder = model.loop.engine, model.model.decoder
        assert decoder is not None
        size = token_bytes(decoder.config, next(decoder.parameters()).element_size())
        pages = engine.pages.count - 1
        about |= {
            "pages": pages,
            "cache_bytes": pages * 16 * size,
            "rows": engine.max_rows,
            "context": engine.capacity,
            "whole_contexts": pages // -(-engine.capacity // 16),
        }
    return about


def _print_plan(rows: list[dict[str, Any]]) -> None:
    names = ["model", "weights", "cache", "pages", "sequences", "context", "whole contexts"]
    keys = ["model", "weights_bytes", "cache_bytes", "pages", "rows", "context", "whole_contexts"]
    cells = [
        [format_bytes(row[key]) if key.endswith("_bytes") and key in row else row.get(key, "") for key in keys]
        for row in rows
    ]
    print_table(names, cells)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Answer the requests in FILE, one a line in OpenAI's batch format, and write a line for each to --out.

    The same command goes on with a batch that was interrupted.
    """

    file: Path = argument(path="file", exists=True)
    model: tuple[str, ...] = option("Model folder, or FOLDER=NAME; may be repeated.", ())
    out: Path = option("File for the results.", REQUIRED, path="file")
    exact: bool = option("Compute every answer bit for bit as if its request were alone; slower.", False)
    max_rows: int | None = option("Decode at most N sequences at a time.  [default: 256]", least=1)
    ray: str | None = ray_option()
    workers: int | None = option(
        "Number of processes with the model.  [default: one for each GPU or, without GPUs, machine]",
        least=1,
        needs=("ray",),
    )
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = option("Load the tokenizer of a published model even if it seems to belong to another one.", False)

    def run(self) -> int | None:
        if not self.model:
            raise ConfigError("batch needs a model; write --model runs/demo-1")
        require_packages()
        from monoblock.cli.ray_cluster import RemoteReplicas, connect
        from monoblock.serving.batch import Answerer, answer_all, read_finished, read_requests
        from monoblock.serving.replica import Replica

        finished = read_finished(self.out)
        total = sum(1 for _ in read_requests(self.file))
        left = (request for request in read_requests(self.file) if request["custom_id"] not in finished)
        if finished:
            echo(f"{len(finished)} of {total} requests are answered already", err=True)
        options = {"exact": self.exact, "max_rows": self.max_rows}
        load = partial(load_models, self.model, self.device, self.dtype, self.force, **options)
        with (
            connect(self.ray) as cluster,
            self.out.open("ab") as out,
            ProgressBar("requests", total, len(finished)) as progress,
        ):
            answerer: Answerer = Replica(load, [secrets.token_urlsafe()])
            if cluster is not None:
                answerer = RemoteReplicas(cluster, load, *cluster.share(self.workers, use_gpus=self.device != "cpu"))
            answered, failed = asyncio.run(answer_all(answerer, left, out, progress))
        echo(f"Answered {answered} requests, {failed} with an error. Results: {self.out}", err=True)
        return 1 if failed or any(finished.values()) else None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Derive the answer of RECEIPT again with MODEL; the exit code is 3 if a token differs.

    RECEIPT is a JSON file: the receipt itself, or an answer that has one. That of a server with --exact is derived
    with the same bits.
    """

    receipt: Path = argument()
    model: str = argument()
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = option("Load the tokenizer of a published model even if it seems to belong to another one.", False)
    as_json: bool = json_option()

    def run(self) -> int | None:
        found: Any = read_json(self.receipt)
        found = found.get("receipt", found) if isinstance(found, dict) else found
        if not isinstance(found, dict) or "answers" not in found:
            raise FileError(f"{self.receipt} has no receipt; give an answer to a request with receipt=true")
        exact = bool(found.get("computed_with", {}).get("exact"))
        (model,) = load_models((self.model,), self.device, self.dtype, self.force, exact=exact)
        from monoblock.serving.receipts import replay

        result = replay(found, model)
        if self.as_json:
            print_json({"equal": result.is_equal, "differences": result.differences, "first": result.first_difference})
        else:
            if result.differences:
                rows = [(name, *map(_shorten, pair)) for name, pair in result.differences.items()]
                print_table(("differs", "receipt", "here"), rows)
            echo(_conclude(result.first_difference, len(found["answers"])))
        return None if result.is_equal else CHECK_FAILED


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:16]}…"


def _conclude(first: Any, count: int) -> str:
    if first is None:
        return f"every token is equal ({count} prompt{'s' if count > 1 else ''})"
    number, index, place, there, here = first
    return f"prompt {number}, text {index}: token {place} is {here}, and {there} in the receipt"
