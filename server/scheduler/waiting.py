"""The queue of requests that have no slot yet, or no longer: by rank, bounded in requests and tokens.

Knows ranks and sizes. Does not know blocks or slots.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from server.scheduler.request import Request

by_rank = attrgetter("rank")


class WaitingQueue:
    """A list sorted by rank: adding and removing are a binary search and one memmove."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests: list[Request] = []
        self.num_tokens = 0  # prompt tokens

    def __len__(self) -> int:
        return len(self._requests)

    def why_full(self, num_prompt_tokens: int, num_free_slots: int) -> str | None:
        """Why no new request of this size may join, or None if it may.

        Requests that the free slots can take at the next step do not count, and an empty queue takes any prompt.
        """
        if len(self) >= self._max_requests + num_free_slots:
            return f"{len(self)} requests are waiting, at most {self._max_requests} may"
        if self._requests and self.num_tokens + num_prompt_tokens > self._max_tokens:
            return (
                f"{self.num_tokens} prompt tokens are waiting, at most {self._max_tokens} may; "
                f"this request has {num_prompt_tokens}"
            )
        return None

    def add(self, request: Request) -> None:
        """Queue a request at its rank; one that was preempted always has room."""
        insort(self._requests, request, key=by_rank)
        self.num_tokens += request.num_prompt_tokens

    def first(self) -> Request | None:
        """The request to be served next; it stays in the queue."""
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        """Take a queued request out."""
        index = bisect_left(self._requests, request.rank, key=by_rank)
        assert self._requests[index] is request, f"request {request.request_id} is not waiting"
        del self._requests[index]
        self.num_tokens -= request.num_prompt_tokens

    def check_integrity(self) -> None:
        """Assert order and counts. For tests and idle moments."""
        assert self._requests == sorted(self._requests, key=by_rank)
        assert self.num_tokens == sum(request.num_prompt_tokens for request in self._requests)
