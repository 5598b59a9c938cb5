from server.engine.worker import backoff_s, pause_after_short_life_s


def test_the_pause_before_an_attempt_grows_from_nothing_to_a_limit() -> None:
    pauses = [backoff_s(attempt) for attempt in range(1, 12)]
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert 0 < pauses[1] < 1
    assert pauses[-1] == 5


def test_an_engine_that_follows_a_short_life_waits_a_moment_and_others_do_not() -> None:
    assert pause_after_short_life_s(0.01) > 0
    assert pause_after_short_life_s(2.0) == 0
