"""One request as the scheduler sees it: which tokens are known, computed or in flight, and what ends it.

    token_ids          [ prompt ........ | read outputs ]          known to the host
    in flight                                            [ ? ]     sampled by a planned step, not read yet
    num_computed       |<- KV in the pool, once the planned steps have run ->|

Does not know other requests, steps or devices.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum

from server.engine.messages import FinishReason, SamplingParams, Submit
from server.kv.block_tables import BlockTable

# A request is served as if it had arrived this many requests earlier per unit of lower priority. Within a priority that
# is first come, first served; across priorities nobody starves, since only so many later ones can overtake.
PRIORITY_HEAD_START = 1024


class Status(Enum):
    """WAITING <-> RUNNING -> DRAINING -> FINISHED; every state may go to FINISHED at once."""

    WAITING = "waiting"  # no slot, no blocks: new or preempted
    RUNNING = "running"  # has a slot and blocks, and more to compute
    DRAINING = "draining"  # its last token is planned, slot and blocks are returned, results are still to come
    FINISHED = "finished"  # its final event is out, or it was aborted; results that still come are dropped


@dataclass(slots=True, eq=False)
class Request:
    """Built by `from_submit`; changed by the scheduler only. `slot` is None unless it runs."""

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    rank: tuple[int, int]  # lower is served earlier and preempted later; unique
    max_total_tokens: int
    status: Status = Status.WAITING
    slot: int | None = None
    num_computed: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int | None = None  # prompt tokens found in the pool when it was first admitted
    has_output: bool = False
    end_ids: Set[int] = frozenset()  # tokens that end it, from min_tokens on
    table: BlockTable = field(default_factory=BlockTable)

    @classmethod
    def from_submit(cls, submit: Submit, arrival: int, eos_token_ids: Set[int]) -> "Request":
        """`arrival` counts the requests of this scheduler."""
        sampling = submit.sampling
        return cls(
            request_id=submit.request_id,
            token_ids=list(submit.token_ids),
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=sampling,
            rank=(arrival + submit.priority * PRIORITY_HEAD_START, arrival),
            max_total_tokens=submit.num_prompt_tokens + sampling.max_tokens,
            end_ids=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids),
        )

    @property
    def num_missing(self) -> int:
        """Known and in-flight tokens whose KV is not planned yet; the last one's logits give the next token."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed

    @property
    def num_offerable(self) -> int:
        """Leading positions whose token is known and whose KV is planned."""
        return min(self.num_computed, len(self.token_ids))

    def why_ended(self) -> FinishReason | None:
        """Why the last known token, one of `end_ids` or the last that max_tokens allows, ends it, if it does."""
        token_id, sampling = self.token_ids[-1], self.sampling
        num_outputs = len(self.token_ids) - self.num_prompt_tokens
        if num_outputs > sampling.min_tokens and token_id in self.end_ids:
            return "stop_token" if token_id in sampling.stop_token_ids else "eos"
        return "length" if num_outputs >= sampling.max_tokens else None
