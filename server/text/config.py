"""What a checkpoint folder says about its text beside the vocabulary: special tokens by role, and the chat template.

Knows tokenizer_config.json and chat_template.jinja as files; does not know ids, nor how a template is rendered.
"""

from pathlib import Path

import msgspec

from server.errors import StartupError


class _TokenObject(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


_Token = str | _TokenObject | None


class _TokenizerConfigFile(msgspec.Struct):
    """The keys of tokenizer_config.json that matter here; others are ignored."""

    bos_token: _Token = None
    eos_token: _Token = None
    unk_token: _Token = None
    sep_token: _Token = None
    pad_token: _Token = None
    cls_token: _Token = None
    mask_token: _Token = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """`special_tokens` maps "bos_token", "eos_token", ... to their text; roles that the model lacks are absent.

    `add_bos_token` and `add_eos_token` None: the tokenizer's own post-processor decides. `chat_template`: jinja source.
    """

    special_tokens: dict[str, str]
    add_bos_token: bool | None
    add_eos_token: bool | None
    chat_template: str | None


def read_text_config(folder: Path) -> TextConfig:
    """Read the two files of `folder`; both may be absent. Raises StartupError naming the file that cannot be read."""
    path = folder / "tokenizer_config.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerConfigFile)
    except FileNotFoundError:
        file = _TokenizerConfigFile()
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return TextConfig(_special_tokens(file), file.add_bos_token, file.add_eos_token, _chat_template(folder, file))


def _special_tokens(file: _TokenizerConfigFile) -> dict[str, str]:
    roles = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    tokens = {role: getattr(file, role) for role in roles}
    return {
        role: token.content if isinstance(token, _TokenObject) else token
        for role, token in tokens.items()
        if token is not None
    }


def _chat_template(folder: Path, file: _TokenizerConfigFile) -> str | None:
    """chat_template.jinja wins over the config's; of several named ones "default" is taken, as transformers does."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if isinstance(file.chat_template, list):
        return next((named.template for named in file.chat_template if named.name == "default"), None)
    return file.chat_template
