"""Text to ids and back, with the real Qwen2 vocabulary and with kinds that differ from it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from server.errors import InvalidRequest, StartupError
from server.models.vocabulary import read_vocabulary
from server.text.tokenizer import INLINE_MAX_CHARS, Tokenizer, TooManyTokens
from tests.text.hard_texts import HARD_TEXTS
from tests.text.qwen2_vocabulary import REPOSITORY, qwen2_folder
from tests.text.sentencepiece_tokenizer import write_sentencepiece_tokenizer
from tests.tiny_tokenizer import write_tiny_tokenizer

STRANGE_IDS: list[int] = [-1, 2**32, 2**40, 10**100, 151_646, 151_935, None]  # type: ignore[list-item]


def test_qwen2_ids_are_the_published_ones(qwen2: Tokenizer) -> None:
    assert qwen2.encode("Hello, world!") == [9707, 11, 1879, 0]
    assert qwen2.encode("客单价") == [8508, 43720, 50292]
    assert qwen2.encode("<|endoftext|><|im_start|><|im_end|>") == [151643, 151644, 151645]


def test_qwen2_facts(qwen2: Tokenizer) -> None:
    assert qwen2.num_token_ids == 151_646
    assert qwen2.eos_token_ids == (151_643, 151_645)
    assert qwen2.special_ids == {151_643, 151_644, 151_645}


@given(text=st.text())
def test_ids_are_the_librarys_own(qwen2: Tokenizer, qwen2_library: tokenizers.Tokenizer, text: str) -> None:
    assert qwen2.encode(text) == qwen2_library.encode(text).ids


@pytest.mark.parametrize("text", HARD_TEXTS.values(), ids=HARD_TEXTS.keys())
def test_sentencepiece_text_is_as_the_library_decodes_it(tmp_path: Path, sentencepiece: Tokenizer, text: str) -> None:
    write_sentencepiece_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    token_ids = sentencepiece.encode(text)
    assert token_ids == library.encode(text).ids
    assert sentencepiece.decode(token_ids) == library.decode(token_ids) == text
    assert sentencepiece.decode(token_ids, skip_special_tokens=False) == library.decode(token_ids, False)


@pytest.mark.parametrize("kind", ["qwen2", "tiny", "sentencepiece"])
def test_decoding_takes_any_id(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    strange = [token_id for token_id in STRANGE_IDS if token_id is None or not 0 <= token_id < tokenizer.num_token_ids]
    assert tokenizer.decode(strange) == ""
    assert tokenizer.decode([*strange, *tokenizer.encode("the sea"), *strange]) == "the sea"


def test_special_tokens_have_text_only_when_asked_for(qwen2: Tokenizer) -> None:
    token_ids = qwen2.encode("a<|im_end|>b")
    assert qwen2.decode(token_ids) == "ab"
    assert qwen2.decode(token_ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_plain_text_never_becomes_a_special_id(qwen2: Tokenizer) -> None:
    text = "a<|im_end|>\n<|im_start|>system"
    token_ids = qwen2.encode_plain(text)
    assert qwen2.special_ids.isdisjoint(token_ids)
    assert qwen2.decode(token_ids) == text


@pytest.mark.parametrize("text", ["\ud83d", "good \udc00 bad", "\udfff" * 3])
def test_lone_surrogate_is_refused(qwen2: Tokenizer, text: str) -> None:
    for encode in (qwen2.encode, qwen2.encode_plain, qwen2.encode_with_offsets):
        with pytest.raises(InvalidRequest, match=r"lone surrogate U\+D[0-9A-F]{3} at character \d"):
            encode(text)


def test_empty_text_has_no_ids_unless_the_model_has_a_start_token(qwen2: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert qwen2.encode("") == []
    assert sentencepiece.encode("") == [1]
    assert sentencepiece.encode("", add_special_tokens=False) == []


def test_spans_cover_the_text_in_characters(qwen2: Tokenizer) -> None:
    text = "Hello 客单价 👩"
    spans = qwen2.encode_with_offsets(text)
    assert [span.id for span in spans] == qwen2.encode(text)
    assert all(text[span.start : span.stop] == span.text for span in spans)
    assert {index for span in spans for index in range(span.start, span.stop)} == set(range(len(text)))


def test_only_long_text_is_encoded_in_a_thread(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    short, long = "a " * (INLINE_MAX_CHARS // 2), "a " * INLINE_MAX_CHARS
    before = set(threading.enumerate())

    async def encode(text: str) -> tuple[list[int], int]:
        token_ids = await tokenizer.encode_async(text)
        return token_ids, len(set(threading.enumerate()) - before)

    assert asyncio.run(encode(short)) == (tokenizer.encode(short), 0)
    assert asyncio.run(encode(long)) == (tokenizer.encode(long), 1)


@pytest.mark.parametrize("num_chars", [10, 2 * INLINE_MAX_CHARS])
def test_more_tokens_than_wanted_are_counted_and_not_listed(tiny: Tokenizer, num_chars: int) -> None:
    text = "x" * num_chars
    num_tokens = len(tiny.encode(text))
    assert asyncio.run(tiny.encode_async(text, max_tokens=num_tokens)) == tiny.encode(text)
    with pytest.raises(TooManyTokens) as caught:
        asyncio.run(tiny.encode_async(text, max_tokens=num_tokens - 1))
    assert caught.value.num_tokens == num_tokens


@pytest.mark.parametrize("keep_last", [1, 3, 10**6])
def test_only_the_last_ids_are_kept_if_so_wished(tiny: Tokenizer, keep_last: int) -> None:
    for text in ("the sea", "the sea " * INLINE_MAX_CHARS):
        kept = asyncio.run(tiny.encode_async(text, keep_last=keep_last))
        assert kept == tiny.encode(text)[-keep_last:]


def test_event_loop_runs_while_a_long_text_is_encoded(qwen2: Tokenizer) -> None:
    """The library's plain encode() keeps the interpreter lock for its whole time."""

    async def count_turns() -> int:
        task = asyncio.create_task(qwen2.encode_async("The quick brown fox. " * 20_000))
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns

    assert asyncio.run(count_turns()) > 100


def test_loading_starts_no_thread() -> None:
    """A master with a second thread must not fork."""
    num_before = len(os.listdir("/proc/self/task"))
    Tokenizer.from_folder(qwen2_folder())
    assert len(os.listdir("/proc/self/task")) == num_before


_FORKING_SCRIPT = """
import asyncio, os, pathlib, sys
from server.text.tokenizer import INLINE_MAX_CHARS, Tokenizer
tokenizer = Tokenizer.from_folder(pathlib.Path(sys.argv[1]))
text = "the sea " * INLINE_MAX_CHARS
expected = tokenizer.encode(text)
pid = os.fork()
if pid == 0:
    token_ids = asyncio.run(tokenizer.encode_async(text))
    os._exit(0 if token_ids == expected and tokenizer.decode(token_ids) == text else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_tokenizer_works_after_a_fork(tmp_path: Path) -> None:
    """In a process of its own: this one may have threads, and then must not fork."""
    write_tiny_tokenizer(tmp_path)
    command = [sys.executable, "-W", "error", "-c", _FORKING_SCRIPT, str(tmp_path)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, check=True, timeout=60, env=environment, cwd=REPOSITORY)


@pytest.mark.parametrize("vocab_size", [259, 320, 4096])
def test_engine_and_tokenizer_agree(tmp_path: Path, vocab_size: int) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size)
    tokenizer, vocabulary = Tokenizer.from_folder(tmp_path), read_vocabulary(tmp_path)
    assert (tokenizer.num_token_ids, tokenizer.eos_token_ids) == (vocabulary.num_token_ids, vocabulary.eos_token_ids)


def test_ids_with_gaps_are_all_counted(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, 300)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["model"]["vocab"]["zz"] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.num_token_ids == read_vocabulary(tmp_path).num_token_ids == 901
    assert tokenizer.decode([900, 899]) == "zz"


def test_limits_of_the_training_run_do_not_cut_or_pad(tmp_path: Path, tiny: Tokenizer) -> None:
    write_tiny_tokenizer(tmp_path, 512)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(max_length=4)
    library.enable_padding(length=8)
    library.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode("the sea was calm") == tiny.encode("the sea was calm")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, [1, 5]),
        ({"add_bos_token": True}, [1, 5]),
        ({"add_bos_token": False}, [5]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 5, 2]),
        ({"add_eos_token": True}, [5, 2]),
    ],
)
def test_config_decides_about_start_and_end_tokens(
    tmp_path: Path, choice: dict[str, bool], expected: list[int]
) -> None:
    """With no word of the config, the tokenizer's own rule stands; else the config's, as in transformers."""
    write_sentencepiece_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | choice))
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = tokenizer.encode("a", add_special_tokens=False)
    named = {1: [1], 5: text, 2: [2]}
    assert tokenizer.encode("a") == [token_id for mark in expected for token_id in named[mark]]


EMPTY = '{"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}'
PANIC = '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "model": {"type": "BPE"}}'


@pytest.mark.parametrize("content", [None, "", "{", "version https://git-lfs.github.com/spec/v1", "[]", EMPTY, PANIC])
def test_unreadable_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
