"""What the routes share: the served model in words and limits, its tokenizer, the way to its engine, and the board.

Made once in the master; every web worker inherits it and starts its own client.
"""

from dataclasses import dataclass

from starlette.requests import Request

from server.engine.client import EngineClient
from server.launch.board import Board
from server.models.facts import ModelFacts
from server.settings.resolve import ResolvedConfig
from server.settings.schema import Settings
from server.telemetry.metrics import RequestMetrics
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Serving:
    """One served model. `revision` is the checkpoint's, null for a plain folder."""

    settings: Settings
    resolved: ResolvedConfig
    facts: ModelFacts
    revision: str | None
    tokenizer: Tokenizer
    engine: EngineClient
    board: Board
    metrics: RequestMetrics

    @property
    def max_model_len(self) -> int:
        """Prompt and output together. The engine knows it exactly once it has made its KV pool."""
        return int(self.board.max_model_len) or self.resolved.max_model_len

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a client may call the model."""
        return (self.resolved.served_name, self.settings.model.path)


def serving_of(request: Request) -> Serving:
    """A route's way to it; as a FastAPI dependency it would cost each request 0.05 ms."""
    serving: Serving = request.app.state.serving
    return serving
