"""What is tuned: the projections of a model, and the numbers of rows at which each is measured."""

from dataclasses import dataclass

from server.models.facts import ModelFacts
from server.ops.cuda.buffer import BufferDType
from server.ops.cuda.tiles import GemmOperation, GemmShape

# A choice is for the rows beyond the size before it and up to its own. Steps of users are below 320 or so.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 1024, 2048)
MAX_LOGITS_ROWS = 512  # rows that are sampled: one per request


@dataclass(frozen=True, slots=True)
class GemmCase:
    """A projection of `num_weights` layers; `block`: columns of a block of gate, and then of up, 0 elsewhere."""

    shape: GemmShape
    num_weights: int
    block: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that a step may have of it."""
        is_per_sample = self.shape.operation == "logits"
        return tuple(size for size in SIZES if not is_per_sample or size <= MAX_LOGITS_ROWS)

    @property
    def out_columns(self) -> int:
        """Of the operation's result."""
        return self.shape.n // 2 if self.shape.operation == "gated_linear" else self.shape.n

    def __str__(self) -> str:
        bias = " + bias" if self.shape.has_bias else ""
        return f"{self.shape.operation} {self.shape.n} x {self.shape.k}{bias}"


def cases_of(facts: ModelFacts) -> list[GemmCase]:
    """Each shape once, in the order of a layer, the head last."""
    hidden, inner, q_columns = facts.hidden_size, facts.intermediate_size, facts.num_heads * facts.head_dim
    dtype: BufferDType = facts.dtype

    def case(operation: GemmOperation, n: int, k: int, has_bias: bool = False, **more: int) -> GemmCase:
        return GemmCase(GemmShape(operation, dtype, n, k, has_bias), **{"num_weights": facts.num_layers} | more)

    cases = [
        case("linear", facts.qkv_rows, hidden, facts.qkv_bias),
        case("linear_add_norm", hidden, q_columns, facts.out_bias),
        case("gated_linear", 2 * inner, hidden, block=inner // facts.num_mlp_blocks),
        case("linear_add_norm", hidden, inner),
        case("logits", facts.vocab_size, hidden, num_weights=1),
    ]
    return list({case.shape: case for case in cases}.values())
