"""What Gunicorn is told to load before anything is forked: an app and a worker class that are never used.

`when_ready` puts the real ones in their place. So uvicorn (0.05 s) is imported after the loader and the dirty arbiter
were forked, beside their work.
"""

from typing import Any

from gunicorn.workers.base import Worker


async def app(_scope: Any, _receive: Any, _send: Any) -> None:
    """In place of server.api.app."""
    raise AssertionError("the app was not built in when_ready")


class WebWorker(Worker):
    """In place of server.launch.web_worker.WebWorker."""
