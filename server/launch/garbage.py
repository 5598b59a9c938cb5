"""When Python's collector of cycles runs: not during a start, and never over what was imported.

A start allocates and keeps: the passes find nothing and take 50 ms of it. Afterwards what is there is frozen, because
a full pass over it (30 ms) would stall a request and copy every page that forks share.
"""

import gc


def pause_collector() -> None:
    """As early as possible. Forks inherit it; each role resumes when its imports are done.

    Only the loader never does: it makes no cycles, and lives for seconds or sleeps.
    """
    gc.disable()


def resume_collector() -> None:
    """From here on what is made is collected; what is there already stays for good."""
    gc.freeze()
    gc.enable()
