"""Memory from huge pages holds what any memory holds, and what was not used goes back."""

import subprocess
import sys

import pytest
import tokenizers

from server.text import huge_heap as module
from server.text.huge_heap import huge_heap
from tests.text.qwen2_vocabulary import qwen2_folder
from tests.tiny_tokenizer import write_tiny_tokenizer

_GROWTH = """
import ctypes
from server.text.huge_heap import huge_heap
sbrk = ctypes.CDLL(None).sbrk
sbrk.restype = ctypes.c_void_p
before = sbrk(0)
with huge_heap(64 << 20):
    inside = sbrk(0)
print(inside - before, sbrk(0) - before)
"""

_LATER = """
import resource
from server.text.huge_heap import huge_heap
with huge_heap(64 << 20):
    pass
def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    bytearray(1 << 20)
before = num_faults()
for _ in range(100):
    bytearray(1 << 20)
print(num_faults() - before)
"""


def test_heap_grows_at_once_and_shrinks_again():
    ran = subprocess.run([sys.executable, "-c", _GROWTH], capture_output=True, text=True, check=True)
    inside, after = map(int, ran.stdout.split())
    assert inside >= 64 << 20
    assert after < 2 << 20


def test_large_buffers_are_reused_afterwards_as_they_are_without():
    ran = subprocess.run([sys.executable, "-c", _LATER], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 100, "pages come anew for each buffer"


def test_tokenizer_read_within_is_the_same():
    path = str(qwen2_folder() / "tokenizer.json")
    plain = tokenizers.Tokenizer.from_file(path)
    with huge_heap(200 << 20):
        read = tokenizers.Tokenizer.from_file(path)
    assert read.to_str() == plain.to_str()


def test_errors_pass_and_small_things_change_nothing(tmp_path, monkeypatch):
    with pytest.raises(KeyError), huge_heap(8 << 20):
        raise KeyError
    write_tiny_tokenizer(tmp_path)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _name: object())  # a C library without mallopt
    with huge_heap(8 << 20):
        assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    with huge_heap(0):
        pass
