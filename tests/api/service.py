"""The real app under a real uvicorn on an ephemeral port, with a small true engine behind it.

The engine is the real loop, sockets, scheduler and KV pool; only the model is replaced: it repeats the prompt for ever,
so a test decides by its prompt what is generated.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import uvicorn

from server.api.app import create_app
from server.engine.core import EngineLoop
from server.engine.peers import Peers
from server.kv.block_tables import BlockTables
from server.launch.board import Board, ModelState, StopMode
from server.models.facts import ModelFacts
from server.scheduler.budget import SchedulerLimits
from server.scheduler.plan import StepPlan, StepResult, TokenChunk
from server.scheduler.scheduler import Scheduler
from server.settings.load import load_settings
from server.settings.machine import Machine
from server.settings.resolve import resolve
from server.weights.index import Checkpoint
from tests.tiny_tokenizer import write_tiny_tokenizer

TOKENIZER_SIZE = 320
VOCAB_SIZE = 330  # a head wider than the tokenizer, as Qwen's
MAX_MODEL_LEN = 512
NUM_BLOCKS, BLOCK_SIZE = 512, 16
FACTS = ModelFacts(
    architecture="Qwen2ForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=MAX_MODEL_LEN,
    rms_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    qkv_bias=True,
    out_bias=False,
    qk_norm=False,
    tied_head=True,
    dtype="float32",
)


class _DoneStep:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


class EchoRunner:
    """Samples token i of the prompt as output i, and begins again at its end.

    A token id in `broken_ids` comes as non-finite logits. With `permits`, each step takes one.
    """

    def __init__(self) -> None:
        self.broken_ids: set[int] = set()
        self.logprob = -0.5
        self.permits: queue.SimpleQueue[None] | None = None
        self.is_at_gate = False
        self.num_steps = 0
        self._tokens: dict[int, list[int]] = {}  # slot -> known tokens
        self._num_prompt_tokens: dict[int, int] = {}

    graph_size = num_graphs = num_graphs_wanted = 0

    def prepare(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> _DoneStep:
        self.num_steps += 1
        if self.permits is not None:
            self.is_at_gate = True
            self.permits.get(timeout=20)
            self.is_at_gate = False
        for reset in plan.resets:
            self._tokens[reset.slot] = list(reset.token_ids)
            self._num_prompt_tokens[reset.slot] = reset.num_prompt_tokens
        ids = [self._sample(chunk) for chunk in plan.chunks if chunk.samples]
        is_finite = [token_id not in self.broken_ids for token_id in ids]
        return _DoneStep(StepResult(plan.step, ids, [self.logprob] * len(ids), is_finite))

    def _sample(self, chunk: TokenChunk) -> int:
        tokens = self._tokens[chunk.slot]
        position = chunk.start + chunk.num_tokens
        token_id = tokens[position - self._num_prompt_tokens[chunk.slot]]
        tokens[position:] = [token_id]
        return token_id


class ApiService:
    """Use as a context manager. `overrides` are settings; the engine starts unless `with_engine` is False."""

    def __init__(self, folder: Path, with_engine: bool = True, gated: bool = False, **overrides: object) -> None:
        write_tiny_tokenizer(folder / "model", TOKENIZER_SIZE)
        chosen = {"server.runtime_dir": str(folder), "model.path": "org/echo", "engine.watchdog_s": 0}
        chosen |= {name.replace("__", "."): value for name, value in overrides.items()}
        self.settings = load_settings("test", {}, chosen)
        self.resolved = resolve(self.settings, FACTS, Machine(1, 1 << 34, 0, None, True))
        self.board = Board.create()
        self.board.started_at = time.monotonic()
        self.runner = EchoRunner()
        self._gated = gated
        self._with_engine = with_engine
        checkpoint = Checkpoint(folder / "model", FACTS, {}, {})
        self.app = create_app(self.settings, self.resolved, checkpoint, self.board, str(folder / "engine.sock"))
        self._tables = BlockTables(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "engine.sock"))
        self._listener.listen(8)

    def __enter__(self) -> "ApiService":
        if self._with_engine:
            self.start_engine()
        config = uvicorn.Config(
            self.app,
            port=0,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        self._web_thread = threading.Thread(target=self._server.run)
        self._web_thread.start()
        wait_until(lambda: self._server.started)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.should_exit = True
        self._web_thread.join(20)
        self.board.stop = StopMode.QUICK
        if self._with_engine:
            self.open_gate()
            self._engine_thread.join(20)
            assert not self._engine_thread.is_alive()
        self._listener.close()
        assert not self._web_thread.is_alive()

    def start_engine(self) -> None:
        """A model worker becomes ready."""
        self._with_engine = True
        engine, board = self.settings.engine, self.board
        limits = SchedulerLimits(
            max_model_len=self.resolved.max_model_len,
            max_num_requests=engine.max_num_requests,
            max_batched_tokens=engine.max_batched_tokens,
            max_waiting_requests=engine.max_waiting_requests,
            max_waiting_tokens=engine.max_waiting_tokens,
        )
        if self._gated:
            self.runner.permits = queue.SimpleQueue()
        self._scheduler = Scheduler(self._tables, limits, self.eos_ids)
        loop = EngineLoop(Peers(self._listener, pid=1), self._scheduler, self.runner, board, drain_limit_s=0)
        board.max_model_len = self.resolved.max_model_len
        board.num_kv_blocks, board.block_size = NUM_BLOCKS - 1, BLOCK_SIZE
        board.num_free_kv_blocks = self._tables.num_free
        board.ready_at = board.engine_beat = time.monotonic()
        board.model_state = ModelState.READY
        self._engine_thread = threading.Thread(target=loop.run)
        self._engine_thread.start()

    def permit(self, num_steps: int) -> None:
        """Let a gated engine run this many more steps."""
        assert self.runner.permits is not None
        for _ in range(num_steps):
            self.runner.permits.put(None)

    def wait_at_gate(self) -> None:
        """Until a gated engine has used its permits and wants another."""
        permits = self.runner.permits
        assert permits is not None
        wait_until(lambda: permits.empty() and self.runner.is_at_gate)

    def drop_permits(self) -> None:
        """Take back what an idle gated engine has not used."""
        assert self.runner.permits is not None
        while not self.runner.permits.empty():
            self.runner.permits.get()

    def metric(self, name: str, **labels: str) -> float:
        """The value of one of our series, 0 before it exists."""
        start = f"model_server_{name}{{"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(start) and all(pair in line for pair in wanted):
                return float(line.split()[-1])
        return 0.0

    def open_gate(self) -> None:
        """Let a gated engine run freely."""
        permits, self.runner.permits = self.runner.permits, None
        if permits is not None:
            permits.put(None)

    @property
    def eos_ids(self) -> set[int]:
        """<|im_end|> and <|endoftext|>."""
        return {self.encode("<|im_end|>")[0], self.encode("<|endoftext|>")[0]}

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        from server.text.tokenizer import Tokenizer

        if not hasattr(self, "_tokenizer"):
            self._tokenizer = Tokenizer.from_folder(Path(self.settings.server.runtime_dir) / "model")
        return self._tokenizer.encode(text)

    @property
    def num_live(self) -> int:
        """Requests in the engine."""
        return self.board.num_running + self.board.num_waiting

    def check_idle(self) -> None:
        """Wait until nothing runs and every KV block is free again."""
        wait_until(lambda: self.num_live == 0 and self.board.num_free_kv_blocks == NUM_BLOCKS - 1)

    def post(self, path: str, body: object) -> httpx.Response:
        """POST `body` as JSON."""
        return self.client.post(path, content=msgspec.json.encode(body), headers={"content-type": "application/json"})


def wait_until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Poll; fails after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not within the time limit"
        time.sleep(0.002)


def events_of(text: str) -> list[str]:
    """The data of an event stream's events, comments left out."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), blocks
    return [block.removeprefix("data: ") for block in blocks]
