"""A checkpoint's chat template: checked messages become the text of a prompt, as transformers renders it.

Owns the roles and what a message may hold. Does not know ids, and requests cannot bring templates of their own.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.errors import InvalidRequest

if TYPE_CHECKING:
    import jinja2

ROLES = ("system", "user", "assistant", "developer", "tool")
RENDER_LIMIT_S = 1.0  # of CPU time; 1000 messages take 0.01 s

Message = Mapping[str, Any]
logger = logging.getLogger(__name__)


class ChatTemplate:
    """Compiled with the first use or by `check`: importing jinja costs 0.1 s, and plain prompts do not wait for it.

    `source` None: the checkpoint has no template, as base models do; then every render is refused.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None
        self._fault = (
            "" if source is not None else "this model has no chat template; /generate and /v1/completions work"
        )

    def check(self) -> str:
        """Compile the template. Returns and logs what is wrong with it, "" if nothing. Call it once at the start."""
        self._compile()
        if self._fault:
            logger.warning("chat is not available: %s", self._fault)
        return self._fault

    @property
    def literal_text(self) -> str:
        """What the template writes by itself; "" if it is absent or broken."""
        compiled = self._compile()
        if compiled is None or self._source is None:
            return ""
        from server.text import sandbox

        return sandbox.literal_text(compiled, self._source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt's text. `messages` come from `check_messages`.

        Raises InvalidRequest: the template is absent or broken, refuses the messages, or takes over RENDER_LIMIT_S.
        """
        compiled = self._compile()
        if compiled is None:
            raise InvalidRequest(self._fault, "messages")
        from server.text import sandbox

        variables = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        variables |= {"messages": self._with_known_roles(messages), "tools": None, "documents": None}
        try:
            return sandbox.render_template(compiled, variables, RENDER_LIMIT_S)
        except Exception as error:  # an edge: the template is foreign code and may raise anything
            logger.info("the chat template failed", exc_info=True)
            raise InvalidRequest(f"the chat template cannot render these messages: {error}", "messages") from error

    def _compile(self) -> "jinja2.Template | None":
        if self._compiled is None and not self._fault and self._source is not None:
            from server.text import sandbox

            try:
                self._compiled = sandbox.compile_template(self._source)
            except Exception as error:  # an edge: constants are folded here, which may raise anything
                self._fault = f"this model's chat template is broken: {error} (line {getattr(error, 'lineno', '?')})"
        return self._compiled

    def _with_known_roles(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Plain dicts. "developer" is the newer name of "system": templates that have not heard of it would drop it."""
        knows_developer = "developer" in (self._source or "")
        rename = {} if knows_developer else {"developer": "system"}
        return [{**message, "role": rename.get(message["role"], message["role"])} for message in messages]


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates expect them: null keys left out, text parts joined by newlines.

    Raises InvalidRequest naming the message: none at all, a role outside ROLES, content that is not text.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name} must be an object with role and content", name)
    given = {key: value for key, value in message.items() if value is not None}
    if given.get("role") not in ROLES:
        raise InvalidRequest(f"{name}.role must be one of {', '.join(ROLES)}", f"{name}.role")
    if "content" in given:
        given["content"] = _joined(given["content"], f"{name}.content")
    elif not (given["role"] == "assistant" and given.get("tool_calls")):
        raise InvalidRequest(f"{name}.content is missing", f"{name}.content")
    return given


def _joined(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part, f"{name}[{index}]") for index, part in enumerate(content))
    raise InvalidRequest(f"{name} must be a string or a list of text parts", name)


def _part_text(part: object, name: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(f'{name} must be {{"type": "text", "text": ...}}; this model reads text only', name)
    return text
