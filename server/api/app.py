"""The FastAPI app: routes, refusals, limits, and the engine's client for as long as a web worker lives."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import ceil

from fastapi import FastAPI

import server
from server.api import completions, health, metrics, models, native, startup
from server.api.errors import add_error_handlers
from server.api.limits import BodyLimit, RequestIds
from server.api.pacing import Pacing
from server.api.serving import Serving
from server.engine.client import ClientLimits, EngineClient
from server.launch.board import Board, Role
from server.settings.resolve import ResolvedConfig
from server.settings.schema import Settings
from server.telemetry.metrics import RequestMetrics
from server.text.tokenizer import Tokenizer
from server.weights.index import Checkpoint

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings, resolved: ResolvedConfig, checkpoint: Checkpoint, board: Board, engine_socket_path: str
) -> FastAPI:
    """Called once, in the master: web workers inherit the app and its tokenizer by fork.

    Reads the tokenizer (0.4 s for a large vocabulary) and raises StartupError if it cannot be used.
    """
    board.begin_stage(Role.MASTER, "tokenizer")
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    board.begin_stage(Role.MASTER, "routes")
    if tokenizer.num_token_ids > checkpoint.facts.vocab_size:
        logger.warning(
            "the tokenizer has %d tokens, the model %d: prompts with the others are refused",
            tokenizer.num_token_ids,
            checkpoint.facts.vocab_size,
        )
    request_metrics = RequestMetrics(resolved.served_name)
    limits = ClientLimits(
        max_requests=settings.engine.max_num_requests + settings.engine.max_waiting_requests,
        max_waiting_tokens=settings.engine.max_waiting_tokens,
        watchdog_s=settings.engine.watchdog_s,
        early_wait_s=settings.engine.early_requests_wait_s,
        max_early_requests=ceil(settings.engine.max_waiting_requests / settings.server.web_workers),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Made here, after the fork: request ids are unique because each worker draws its own range.
        engine = EngineClient(engine_socket_path, board, limits, request_metrics.observe_gaps)
        app.state.serving = Serving(
            settings, resolved, checkpoint.facts, _revision_of(checkpoint), tokenizer, engine, board, request_metrics
        )
        await engine.start()
        try:
            yield
        finally:
            await engine.close()

    app = FastAPI(title="model-server", version=server.__version__, lifespan=lifespan, redirect_slashes=False)
    for routes in (health, startup, native, completions, models, metrics):
        app.include_router(routes.router)
    add_error_handlers(app, request_metrics.count_error)
    app.add_middleware(BodyLimit, max_bytes=settings.server.max_body_bytes)
    app.add_middleware(RequestIds)
    app.add_middleware(Pacing)
    return app


def _revision_of(checkpoint: Checkpoint) -> str | None:
    """The commit, if the folder is a snapshot of a hub cache."""
    return checkpoint.folder.name if checkpoint.folder.parent.name == "snapshots" else None
