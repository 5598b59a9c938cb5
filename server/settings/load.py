"""Where settings come from, and in which order: base.toml < profile < operator's file < environment < command line.

Owns the names of files and environment variables. Does not know what a setting means or what "auto" becomes.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from server.errors import StartupError
from server.settings.schema import Settings

DEFAULT_PROFILE = "demo"
PROFILE_VARIABLE = "MODEL_SERVER_PROFILE"
CONFIG_VARIABLE = "MODEL_SERVER_CONFIG"
OVERRIDES_VARIABLE = "MODEL_SERVER_OVERRIDES"
_TYPE_WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
}
_PREFIX = "MODEL_SERVER_"
_OWN_VARIABLES = (PROFILE_VARIABLE, CONFIG_VARIABLE, OVERRIDES_VARIABLE)
# Kubernetes puts these into every pod beside a Service whose name begins with "model-server"; they are not ours.
_SERVICE_LINK = re.compile(
    r"MODEL_SERVER_([A-Z0-9]+_)*(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source of values: {section: {field: value}}. `from_text`: a string may stand for a number or a bool."""

    source: str
    sections: Mapping[str, Any]
    from_text: bool = False


def load_settings(
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings as the user asked for them. Without arguments: what os.environ says.

    `overrides` maps "section.field" to a value or its text; it wins over those in MODEL_SERVER_OVERRIDES (JSON, how the
    command line reaches gunicorn.conf.py). Raises StartupError naming the key, its source and the nearest right name.
    """
    environ = os.environ if environ is None else environ
    merged: dict[str, dict[str, object]] = {section: {} for section in _fields_of(Settings)}
    for layer in _layers(
        profile or environ.get(PROFILE_VARIABLE) or DEFAULT_PROFILE,
        environ,
        overrides or {},
    ):
        _merge(merged, layer)
    try:
        return msgspec.convert(merged, Settings)
    except msgspec.ValidationError as error:  # every value was checked on its way in: only a missing one is left
        raise StartupError(f"{_config_folder() / 'base.toml'}: {error}") from error


def profile_names() -> list[str]:
    """The profiles that exist, sorted."""
    return sorted(path.stem for path in (_config_folder() / "profiles").glob("*.toml"))


def _config_folder() -> Path:
    """`config/` inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "config", package.parent / "config"):
        if (folder / "base.toml").is_file():
            return folder
    raise StartupError(f"config/base.toml is missing: neither {package} nor {package.parent} has it; install again")


def _layers(profile: str, environ: Mapping[str, str], overrides: Mapping[str, object]) -> Iterable[_Layer]:
    if profile not in (names := profile_names()):
        raise StartupError(
            f"profile {profile!r} does not exist{_nearest(profile, names)}; there are {', '.join(names)}"
        )
    yield _read_toml(_config_folder() / "base.toml")
    yield _read_toml(_config_folder() / "profiles" / f"{profile}.toml")
    if config_path := environ.get(CONFIG_VARIABLE):
        yield _read_toml(Path(config_path))
    yield from _environment_layers(environ)
    yield from _override_layers(
        f"command line ({OVERRIDES_VARIABLE})", _parse_overrides(environ.get(OVERRIDES_VARIABLE) or "{}")
    )
    yield from _override_layers("command line", overrides)


def _read_toml(path: Path) -> _Layer:
    try:
        return _Layer(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise StartupError(f"settings file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"settings file {path} is not TOML: {error}") from error


def _environment_layers(environ: Mapping[str, str]) -> Iterable[_Layer]:
    known = {f"{_PREFIX}{section}__{field}".upper(): (section, field) for section, field in _all_keys()}
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in _OWN_VARIABLES:
            continue
        if name in known:
            section, field = known[name]
            yield _Layer(
                f"environment variable {name}",
                {section: {field: environ[name]}},
                from_text=True,
            )
        elif not _is_service_link(name, environ[name]):
            hint = _nearest(name, [*known, *_OWN_VARIABLES])
            raise StartupError(f"environment variable {name} is not a setting{hint}")


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set it. MODEL_SERVER_PORT=9000 is no link (theirs is a URL) but a misspelt setting."""
    return bool(_SERVICE_LINK.fullmatch(name)) and (not name.endswith("_PORT") or "SERVICE" in name or "://" in value)


def _parse_overrides(text: str) -> dict[str, object]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise StartupError(f"{OVERRIDES_VARIABLE} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise StartupError(f'{OVERRIDES_VARIABLE} must be an object such as {{"server.port": 8001}}, found {text[:80]}')
    return parsed


def _override_layers(source: str, overrides: Mapping[str, object]) -> Iterable[_Layer]:
    for key, value in overrides.items():
        section, dot, field = key.partition(".")
        if not dot:
            names = [f"{section}.{field}" for section, field in _all_keys()]
            raise StartupError(f"{source}: {key!r} is not of the form section.field{_nearest(key, names)}")
        yield _Layer(source, {section: {field: value}}, from_text=True)


def _merge(merged: dict[str, dict[str, object]], layer: _Layer) -> None:
    sections = _fields_of(Settings)
    for section, table in layer.sections.items():
        if section not in sections:
            raise StartupError(f"{layer.source}: no section [{section}]{_nearest(section, sections)}")
        if not isinstance(table, dict):
            raise StartupError(f"{layer.source}: [{section}] must be a table, found {section} = {table!r}")
        fields = _fields_of(sections[section])
        for field, value in table.items():
            if field not in fields:
                raise StartupError(f"{layer.source}: no key {section}.{field}{_nearest(field, fields)}")
            merged[section][field] = _convert(f"{section}.{field}", value, fields[field], layer)


def _convert(key: str, value: object, expected_type: Any, layer: _Layer) -> object:
    """The value in its field's type. Raises StartupError with source, key, what was found and what was expected."""
    try:
        converted: object = msgspec.convert(
            value,
            expected_type,
            strict=not (layer.from_text and isinstance(value, str)),
        )
    except msgspec.ValidationError:
        converted = inf
    if isinstance(converted, float) and not isfinite(converted):
        found = f"{value!r} ({type(value).__name__})"
        raise StartupError(f"{layer.source}: {key} is {found}, expected {_describe(expected_type)}")
    return converted


def _describe(expected_type: Any) -> str:
    """A field's type in words: `a whole number >= 1 and <= 64`, `one of auto, cpu, cuda`."""
    base, *metas = get_args(expected_type) if hasattr(expected_type, "__metadata__") else (expected_type,)
    if get_origin(base) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(base))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(meta, name)}"
        for meta in metas
        for name, sign in signs.items()
        if getattr(meta, name) is not None
    ]
    return " ".join([_TYPE_WORDS[base], " and ".join(bounds)]).rstrip()


def _fields_of(struct: Any) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


def _all_keys() -> list[tuple[str, str]]:
    return [(section, field) for section, table in _fields_of(Settings).items() for field in _fields_of(table)]


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """`, did you mean X?`, or nothing when no name is near."""
    from difflib import get_close_matches  # needed only on the way to a refusal

    candidates = list(candidates)
    field = name.removeprefix(_PREFIX)
    without_section = [candidate for candidate in candidates if candidate.endswith((f".{field}", f"__{field}"))]
    matches = without_section or get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f", did you mean {matches[0]}?" if matches else ""
