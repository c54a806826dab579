"""`monoblock batch FILE.jsonl --model M --out OUT.jsonl`: answer a file of requests, without a server."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path

from monoblock.cli.model_options import device_option, dtype_option, force_option
from monoblock.cli.output import ProgressBar, echo
from monoblock.cli.serve import serve_models
from monoblock.cli.verb import REQUIRED, argument, option
from monoblock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Answer the requests in FILE, one a line in OpenAI's batch format, and write a line for each to --out.

    The same command goes on with a batch that was interrupted.
    """

    file: Path = argument(path="file", exists=True)
    model: tuple[str, ...] = option("Model folder, or FOLDER=NAME; may be repeated.", ())
    out: Path = option("File for the results.", REQUIRED, path="file")
    exact: bool = option("Compute every answer bit for bit as if its request were alone; slower.", False)
    max_rows: int | None = option("Decode at most N sequences at a time.  [default: as many as suit memory]", least=1)
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = force_option()

    def run(self) -> int | None:
        if not self.model:
            raise ConfigError("batch needs a model; write --model runs/demo-1")
        options = {"exact": self.exact, "max_rows": self.max_rows, "force": self.force}
        models = serve_models(self.model, self.device, self.dtype, **options)
        from monoblock.serving.app import create_app
        from monoblock.serving.batch import answer_all, read_finished, read_requests

        finished, key = read_finished(self.out), secrets.token_urlsafe()
        total = sum(1 for _ in read_requests(self.file))
        left = (request for request in read_requests(self.file) if request["custom_id"] not in finished)
        if finished:
            echo(f"{len(finished)} of {total} requests are answered already", err=True)
        rows = max([model.loop.engine.max_rows for model in models] + [16])
        gate = create_app(models, [key])
        with self.out.open("ab") as out, ProgressBar("requests", total, len(finished)) as progress:
            answered, failed = asyncio.run(answer_all(gate, key, left, out, at_once=rows + 32, progress=progress))
        echo(f"Answered {answered} requests, {failed} with an error. Results: {self.out}", err=True)
        return 1 if failed else None
