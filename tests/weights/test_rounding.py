"""Rounding between dtypes gives the bits that torch gives."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.models.facts import DType
from server.weights.rounding import LARGEST, first_overflow, from_float32, to_float32
from tests.tiny_models import TORCH_DTYPES

EDGES = [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 1e-8, 1e-40, 3.3895e38, 3.4e38, float("inf"), -float("inf")]


def torch_bits(values: np.ndarray, dtype: DType) -> bytes:
    return torch.from_numpy(values.copy()).to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_equals_that_of_torch_for_random_bits_and_edges(dtype: DType) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    values = np.concatenate([bits.view(np.float32), np.array(EDGES, dtype=np.float32)])
    values = values[~np.isnan(values)]
    assert from_float32(values, dtype).tobytes() == torch_bits(values, dtype)


@given(value=st.floats(width=32, allow_nan=False), dtype=st.sampled_from(["bfloat16", "float16"]))
def test_rounding_equals_that_of_torch(value: float, dtype: DType) -> None:
    values = np.array([value], dtype=np.float32)
    assert from_float32(values, dtype).tobytes() == torch_bits(values, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_number_survives_the_way_through_float32(dtype: DType) -> None:
    data = np.arange(65536, dtype="<u2").tobytes()
    values = to_float32(data, dtype)
    again = from_float32(values, dtype)
    is_number = ~np.isnan(values)
    assert np.array_equal(again.view("<u2")[is_number], np.arange(65536, dtype="<u2")[is_number])
    assert np.isnan(to_float32(again.tobytes(), dtype)[~is_number]).all()


def test_a_nan_stays_a_nan() -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], dtype=np.uint32)
    for dtype in ("bfloat16", "float16"):
        assert np.isnan(to_float32(from_float32(bits.view(np.float32), dtype).tobytes(), dtype)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_only_a_finite_value_that_becomes_infinite_is_an_overflow(dtype: DType) -> None:
    fine = np.array([1.0, LARGEST[dtype], np.inf, np.nan], dtype=np.float32)
    assert first_overflow(fine, from_float32(fine, dtype), dtype) is None
    too_large = np.nextafter(np.float32(LARGEST["float32"]), np.float32(0))
    values = np.array([1.0, too_large], dtype=np.float32)
    assert first_overflow(values, from_float32(values, dtype), dtype) == too_large
