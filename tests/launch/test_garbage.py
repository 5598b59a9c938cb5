"""The collector rests during a start, and afterwards leaves alone what the start made."""

import gc

from server.launch.garbage import pause_collector, resume_collector


def test_what_a_start_made_is_never_looked_at_again():
    assert gc.isenabled()
    frozen_before = gc.get_freeze_count()
    pause_collector()
    try:
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    finally:
        resume_collector()
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen_before
        assert all(one is not other for one in made[:1] for other in gc.get_objects())
    finally:
        gc.unfreeze()
