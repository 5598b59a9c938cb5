"""What is asked of the demo model's answers: real words, no loops, nothing recited.

Knows texts and token ids. Does not know models.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
HASH_BASE = np.uint64(6_364_136_223_846_793_005)


def load_word_list(path: Path) -> frozenset[str]:
    """A gzipped list of one word a line, compared without case."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return frozenset(line.strip().lower() for line in file)


def answer_words(prompt: str, text: str, is_cut: bool) -> list[str]:
    """Words of `text` after those of its `prompt`; a word that the token limit cut is left out."""
    words = WORD.findall(text)[len(WORD.findall(prompt)) :]
    return words[:-1] if is_cut and words and text.endswith(words[-1]) else words


def is_listed(word: str, word_list: frozenset[str]) -> bool:
    word = word.lower()
    return word in word_list or word.removesuffix("'s") in word_list


def longest_repeat(token_ids: Sequence[int]) -> int:
    """Length of the longest n-gram that occurs twice."""
    width = 0
    while has_repeat(token_ids, width + 1):
        width += 1
    return width


def has_repeat(token_ids: Sequence[int], width: int) -> bool:
    windows = [tuple(token_ids[i : i + width]) for i in range(len(token_ids) - width + 1)]
    return len(set(windows)) < len(windows)


def window_hashes(token_ids: npt.NDArray[np.integer], width: int) -> npt.NDArray[np.uint64]:
    """One 64-bit hash for each window of `width` ids."""
    ids = token_ids.astype(np.uint64)
    num_windows = max(len(ids) - width + 1, 0)
    hashes = np.zeros(num_windows, np.uint64)
    for offset in range(width):
        hashes = hashes * HASH_BASE + ids[offset : offset + num_windows] + np.uint64(1)
    return hashes


class TrainingSpans:
    """Knows every span of the training tokens, to tell what was recited."""

    def __init__(self, train_ids: npt.NDArray[np.integer]) -> None:
        self._train_ids = train_ids
        self._hashes: dict[int, npt.NDArray[np.uint64]] = {}

    def contains(self, token_ids: Sequence[int], width: int) -> bool:
        """True when any window of `width` ids is a span of the training tokens."""
        if width not in self._hashes:
            self._hashes[width] = np.sort(window_hashes(self._train_ids, width))
        hashes = window_hashes(np.array(token_ids), width)
        known = self._hashes[width]
        places = np.searchsorted(known, hashes).clip(max=len(known) - 1)
        return bool((known[places] == hashes).any())
