"""Gunicorn's logger in our format, from the first line on. Named in gunicorn.conf.py."""

from typing import Any

from gunicorn.glogging import Logger

from server.telemetry.logging import configure_logging


class GunicornLogger(Logger):
    """Gunicorn constructs it in the master; other roles call `configure_logging` after their fork."""

    def setup(self, cfg: Any) -> None:
        """Called once, before anything is logged."""
        super().setup(cfg)  # type: ignore[no-untyped-call]
        configure_logging("master", cfg.loglevel)
