"""FastAPI without its OpenAPI validators is the same FastAPI."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, sys
from pydantic import BaseModel
config = BaseModel.model_config
if sys.argv[1] == "lean":
    from server.api.lean_import import import_fastapi
    import_fastapi()
import fastapi.openapi.models
is_deferred = not fastapi.openapi.models.Info.__pydantic_complete__
assert BaseModel.model_config is config
class Own(BaseModel):
    number: int
assert Own.__pydantic_complete__
from server.api import completions, health, native
app = fastapi.FastAPI(title="t")
for routes in (health, native, completions):
    app.include_router(routes.router)
print(json.dumps([is_deferred, app.openapi()]))
"""


@pytest.fixture(scope="module")
def documents():
    def document(how):
        ran = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
        return json.loads(ran.stdout)

    return document("lean"), document("plain")


def test_validators_of_openapi_are_made_when_the_document_is_asked_for(documents):
    (lean, _), (plain, _) = documents
    assert (lean, plain) == (True, False)


def test_document_is_the_same_and_describes_bodies(documents):
    (_, lean), (_, plain) = documents
    assert lean == plain
    body = lean["paths"]["/generate"]["post"]["requestBody"]
    assert body["required"]
    assert set(body["content"]["application/json"]["schema"]["properties"]) == {"inputs", "parameters"}
    assert "$ref" not in json.dumps(body)
