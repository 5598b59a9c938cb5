from server.engine.worker import backoff_s


def test_the_pause_before_an_attempt_grows_from_nothing_to_a_limit() -> None:
    pauses = [backoff_s(attempt) for attempt in range(1, 12)]
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert 0 < pauses[1] < 1
    assert pauses[-1] == 5
