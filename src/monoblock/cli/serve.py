"""`monoblock serve MODEL…`: answer OpenAI's API over HTTP."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.cli.model_options import device_option, dtype_option, force_option, load_pipeline
from monoblock.cli.output import echo, format_bytes, print_json, print_table
from monoblock.cli.verb import argument, json_option, option
from monoblock.errors import ConfigError, FileError

if TYPE_CHECKING:
    from monoblock.serving.served_model import ServedModel

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra [serve]
KEY_VARIABLE = "OPENAI_API_KEY"  # which OpenAI's client reads


def require_packages() -> None:
    """Raise ConfigError unless the packages of the extra are installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}; write pip install 'monoblock[serve]'")


def serve_models(models: tuple[str, ...], device: str | None, dtype: str | None, **options: Any) -> list[ServedModel]:
    """Load models under the names of their folders; MODEL=NAME gives another name."""
    require_packages()
    from monoblock.serving.served_model import ServedModel

    force, served = options.pop("force", False), []
    for given in models:
        folder, _, name = given.partition("=")
        name = name or Path(folder).name
        if name in {one.name for one in served}:
            raise ConfigError(f"two models are called {name}; write {given}=NAME to give this one another name")
        served.append(ServedModel(name, load_pipeline(folder, device, dtype, force=force), **options))
    return served


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
    max_rows: int | None = option("Decode at most N sequences at a time.  [default: as many as suit memory]", least=1)
    max_queue: int = option("Let at most N requests wait; more are refused with 429.", 256, least=0)
    dry_run: bool = option("Load nothing to serve; say what fits into memory.", False)
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = force_option()
    as_json: bool = json_option("With --dry-run: print JSON.")

    def run(self) -> None:
        require_packages()
        from monoblock.serving.app import create_app
        from monoblock.serving.process import check_host, log_to_stderr, serve

        if not self.model:
            raise ConfigError("serve needs a model; write monoblock serve runs/demo-1")
        check_host(self.host, has_key_file=self.api_key_file is not None)
        keys = [f"mb-{secrets.token_urlsafe(24)}"] if self.api_key_file is None else _read_keys(self.api_key_file)
        options = {"exact": self.exact, "max_rows": self.max_rows, "max_queue": self.max_queue, "force": self.force}
        models = serve_models(self.model, self.device, self.dtype, **options)
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
            echo(f"export OPENAI_BASE_URL={address}/v1 {KEY_VARIABLE}={keys[0]}", err=True)
        echo(f"Serving on {address} (Ctrl-C ends it)", err=True)
        sys.stderr.flush()
        log_to_stderr()
        serve(create_app(models, keys, (self.host, *self.allow_host)), self.host, self.port)


def _read_keys(path: Path) -> list[str]:
    keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not keys or min(map(len, keys)) < 16:
        raise FileError(f"{path} has no key, or one of fewer than 16 characters; write one long random key per line")
    return keys


def _describe(model: ServedModel) -> dict[str, Any]:
    """Return what a model takes of the memory, and what fits."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.pipe.model.state_dict().values())
    about: dict[str, Any] = {"model": model.name, "weights_bytes": weights, "routes": model.abilities}
    if model.decodes:
        from monoblock.nn.paged_cache import token_bytes

        engine = model.loop.engine
        pages, size = engine.pages.count - 1, token_bytes(model.pipe.model)  # type: ignore[arg-type]
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
