"""Imports FastAPI without making the validators of its OpenAPI models, which only /openapi.json needs (80 of 190 ms).

They are made when that document is first asked for. Knows pydantic's `defer_build` and nothing of our app.
"""

from pydantic import BaseModel, ConfigDict


def import_fastapi() -> None:
    """Call it before anything else imports FastAPI; later it changes nothing."""
    config = BaseModel.model_config
    BaseModel.model_config = ConfigDict(defer_build=True)  # which FastAPI's models inherit, and ours must not
    try:
        import fastapi  # noqa: F401
    finally:
        BaseModel.model_config = config
