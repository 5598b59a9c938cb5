"""A device in host memory whose clock goes by what it ran, and kernels for it: for tests of scripts/tune-kernels."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from server.kernels.candidates import Candidate
from server.kernels.catalog import Recipe
from server.models.facts import ModelFacts
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Function, GemmAlgorithm, KernelImage, Stream
from tests.ops.gemm_images import tile_constants
from tests.ops.host_driver import HostDriver
from tests.ops.host_kernels import host_image

FACTS = ModelFacts(
    architecture="Qwen2ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
    rms_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    qkv_bias=True,
    out_bias=False,
    qk_norm=False,
    tied_head=False,
    dtype="bfloat16",
)


class ClockedDriver(HostDriver):
    """Each GEMM takes what `gemm_ms` says of its algorithm, each kernel what `kernel_ms` says of its name and block."""

    def __init__(self) -> None:
        super().__init__(total_bytes=4 << 30)
        self.gemm_ms: Callable[[GemmAlgorithm | None], float] = lambda _: 1.0
        self.kernel_ms: Callable[[KernelImage], float] = lambda _: 0.0
        self._now = 0.0
        self.clock_ms = lambda: self._now

    def gemm_async(
        self,
        x: Buffer,
        weight: Buffer,
        bias: Buffer | None,
        out: Buffer,
        workspace: Buffer,
        stream: Stream,
        algorithm: GemmAlgorithm | None = None,
    ) -> None:
        super().gemm_async(x, weight, bias, out, workspace, stream, algorithm)
        self._issue(self._captures.get(stream), lambda: self._pass(self.gemm_ms(algorithm)))

    def launch_async(
        self, function: Function, grid: tuple[int, int, int], values: Sequence[int | float], stream: Stream
    ) -> None:
        super().launch_async(function, grid, values, stream)
        self._issue(self._captures.get(stream), lambda: self._pass(self.kernel_ms(function.image)))

    def _pass(self, ms: float) -> None:
        self._now += ms


class HostCandidates:
    """In place of compiled ones: what the interpreter runs, the same object each time."""

    failures: Sequence[str] = ("kernel x cannot be compiled: too much",)

    def __init__(self, folder: Path | None = None, arch: str = "") -> None:
        self.folder = folder
        self._images: list[tuple[Recipe, KernelImage]] = []

    def compile(self, recipes: Iterable[Recipe], num_processes: int, say: Callable[[str], None]) -> None:
        say(f"{len(list(recipes))} recipes for {self.folder}")

    def image(self, recipe: Recipe) -> KernelImage:
        for known, image in self._images:
            if known == recipe:
                return image
        self._images.append((recipe, host_image(recipe)))
        return self._images[-1][1]


KERNELS_OF: dict[str, str] = {
    "linear": "linear",
    "linear_add_norm": "linear_split",
    "gated_linear": "gated_linear",
    "logits": "linear_fp32",
}


def one_candidate(operation: str, m: int, n: int, k: int, *, has_bias: bool, block: int, arch: str) -> list[Candidate]:
    name = KERNELS_OF[operation]
    constants = tile_constants(name, 16, 64, has_bias=has_bias)
    return [Candidate(name, constants, 4, 3, num_splits=3 if "split" in name else 1)]
