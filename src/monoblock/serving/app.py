"""The web application: models, routes and errors, behind the gate of security.py.

app = create_app([ServedModel("demo", mb.load("runs/demo-1"))], keys=["secret"])
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from monoblock import __version__
from monoblock.errors import MonoblockError, did_you_mean
from monoblock.serving import openai_routes, own_routes
from monoblock.serving.engine_loop import Draining, QueueFull
from monoblock.serving.metrics import Metrics
from monoblock.serving.requests import FIELDS, REFUSED
from monoblock.serving.security import Gate, TooLarge, TooSlow, error_body, retry_header
from monoblock.serving.served_model import OutOfTime, ServedModel, TooLong

logger = logging.getLogger("monoblock.serving")
CHAT_PAGE = Path(__file__).with_name("chat.html")
PROBLEMS = (MonoblockError, RequestValidationError, HTTPException, TooLarge, TooSlow, Exception)
HTTP_MESSAGES = {
    404: "there is no such route; GET /openapi.json lists them",
    405: "this route has other methods; GET /openapi.json lists them",
}


class UnknownModel(MonoblockError):
    """A request for a model that this server does not have."""


class ReplicaLost(MonoblockError):
    """A process that answered a request has ended, and the answer with it; the request may be sent again."""


class Server:
    """The models of an application, and what it counts; the routes find it as `request.app.state.server`."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.name: model for model in models}
        self.metrics = Metrics(models)
        self.routes: set[str] = set()

    def find(self, name: str) -> ServedModel:
        if name not in self.models:
            hint = did_you_mean(name, self.models) or f"; this server has {', '.join(self.models)}"
            raise UnknownModel(f"there is no model {name!r:.80}{hint}")
        return self.models[name]

    def model(self, name: str, ability: str) -> ServedModel:
        """Return a model that answers a route, and has room for a request."""
        model = self.find(name)
        model.check(ability)
        model.loop.check_room()
        return model

    def report(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count and log an answer; the path is that of a route, so that clients cannot invent names."""
        route = path if path in self.routes else "other"
        self.metrics.requests.labels(route, status).inc()
        fields = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4)}
        logger.info("answered", extra={"fields": fields})

    @staticmethod
    def error_event(problem: Exception) -> dict[str, Any]:
        """Return an exception as an event of a stream that has begun."""
        return describe(problem)[1]


def create_app(
    models: Sequence[ServedModel], keys: Iterable[str], hosts: Iterable[str] = (), max_body: int | None = None
) -> Gate:
    """Return the application that serves these models to clients with one of these keys."""
    server = Server(models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for model in server.models.values():
            model.loop.start()
        yield
        for model in server.models.values():
            await model.loop.stop()

    app = FastAPI(title="monoblock", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    app.include_router(openai_routes.router)
    app.include_router(own_routes.router)
    for kind in PROBLEMS:
        app.add_exception_handler(kind, answer_problem)

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return FileResponse(CHAT_PAGE, media_type="text/html")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Say whether requests are taken: every engine runs, and the server is not shutting down."""
        is_ready = not gate.is_draining and all(model.loop.is_alive for model in server.models.values())
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    server.routes = {"/", *app.openapi()["paths"]}
    gate = Gate(app, keys, hosts, **({} if max_body is None else {"max_body": max_body}))
    gate.report = server.report
    gate.most = sum(model.loop.most for model in server.models.values())
    return gate


# -- errors -----------------------------------------------------------------------------------------------------------


def describe(problem: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the body that tell a client of an exception, and nothing of the machine."""
    invalid = "invalid_request_error"
    if isinstance(problem.__cause__, TooLarge | TooSlow):  # which a reader of bodies has wrapped
        problem = problem.__cause__
    match problem:
        case QueueFull():
            return 429, error_body(str(problem), "rate_limit_error", "queue_full")
        case Draining():
            return 503, error_body(str(problem), "server_error", "shutting_down")
        case ReplicaLost():
            return 503, error_body(str(problem), "server_error", "replica_lost")
        case UnknownModel():
            return 404, error_body(str(problem), invalid, "model_not_found", "model")
        case OutOfTime():
            return 408, error_body(str(problem), invalid, "timeout")
        case TooLong():
            return 400, error_body(str(problem), invalid, "context_length_exceeded")
        case RequestValidationError():
            message, field = _first_error(problem)
            return 400, error_body(message, invalid, None, field)
        case TooLarge():
            return 413, error_body("the request is larger than this server reads; send less", invalid, "too_large")
        case TooSlow():
            return 408, error_body("the request did not arrive in time; send it again", invalid, "too_slow")
        case HTTPException():
            message = HTTP_MESSAGES.get(problem.status_code, "the request cannot be read; send JSON")
            return problem.status_code, error_body(message, invalid)
        case MonoblockError():
            return 400, error_body(str(problem), invalid)
    return 500, error_body("the request has failed; its error is in the log of the server", "server_error")


async def answer_problem(request: Request, problem: Exception) -> Response:
    status, body = describe(problem)
    return JSONResponse(body, status, retry_header(status))


def _first_error(problem: RequestValidationError) -> tuple[str, str | None]:
    """Return what is wrong with a body in one line, and the field that it is about."""
    error = problem.errors()[0]
    place = [
        str(part) for part in error["loc"][1:] if isinstance(part, int) or part.isidentifier()
    ]  # no types of pydantic
    field = ".".join(place)[:100].encode("ascii", "replace").decode()
    if error["type"] == "extra_forbidden":
        if field in REFUSED:
            return f"{field} is not supported: {REFUSED[field]}", field
        return f"there is no field {field!r}{did_you_mean(field, FIELDS) or '; leave it out'}", field
    if error["type"] == "json_invalid":
        return 'the body is not JSON; send an object such as {"model": …}', None
    if error["type"] == "missing":
        return f"{field or 'the body'} is missing", field or None
    return f"{field}: {error['msg'][:200]}", field
