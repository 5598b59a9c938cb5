"""Philox4x32-10 against the known answers of Random123 (kat_vectors)."""

import pytest
import torch

from server.ops.torch.philox import philox4x32
from tests.ops.sampling_reference import philox4x32_10

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key))
    assert tuple(int(word) for word in words) == expected
    assert philox4x32_10(counter, key) == expected


def test_a_batch_equals_its_entries() -> None:
    generator = torch.Generator().manual_seed(0)
    counter = tuple(torch.randint(0, 2**32, (50,), generator=generator) for _ in range(4))
    key = tuple(torch.randint(0, 2**32, (50,), generator=generator) for _ in range(2))
    batch = torch.stack(philox4x32(counter, key))
    for entry in range(50):
        expected = philox4x32_10(tuple(int(word[entry]) for word in counter), tuple(int(word[entry]) for word in key))
        assert tuple(batch[:, entry].tolist()) == expected
