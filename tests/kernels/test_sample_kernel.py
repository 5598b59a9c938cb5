"""The sampler's kernels on their own: the noise, and what the searches keep, with tiles so small that all is done."""

import dataclasses
from pathlib import Path
from random import Random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels import sample
from server.ops.cuda.driver import KernelImage, Parameter
from server.ops.cuda.kernels import Kernels
from server.ops.sampling import SlotSampling
from server.ops.torch.sampler import gumbel_noise
from tests.ops.host_driver import allocate_buffer, as_tensor, to_device
from tests.ops.sampling_reference import gumbel
from tests.ops.test_cuda_sampler import SamplerRig, host_driver, interpreted_images
from tests.ops.test_sampler import every_kind, sampling

SMALL = {"TILE": 128, "STEP": 128, "CANDIDATES": 16}


@triton.jit
def noise(ids, out, position, seed_low, seed_high, COUNT: tl.constexpr):
    """out [COUNT] = the noise of ids [COUNT]."""
    places = tl.arange(0, COUNT)
    drawn = sample._gumbel(
        tl.load(ids + places), position, seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    )
    tl.store(out + places, drawn)


@triton.jit
def noise_of_words(words, out, COUNT: tl.constexpr):
    """out [COUNT] = the noise that random words give."""
    places = tl.arange(0, COUNT)
    tl.store(out + places, sample._gumbel_of_word(tl.load(words + places).to(tl.uint32, bitcast=True)))


def image(function: str, parameters: dict[str, str], count: int) -> KernelImage:
    described = tuple(Parameter(name, kind, 4 if kind.startswith("*") else 1) for name, kind in parameters.items())
    source = f"tests.kernels.test_sample_kernel:{function}"
    return KernelImage(function, source, {"COUNT": count}, described, function, 4, 0, Path())


def small_rig(monkeypatch: pytest.MonkeyPatch, vocab_size: int, max_rows: int) -> SamplerRig:
    images = []
    for built in interpreted_images():
        constants = {name: SMALL.get(name, value) for name, value in built.constants.items()}
        images.append(dataclasses.replace(built, constants=constants))
    for name, value in SMALL.items():
        monkeypatch.setattr(f"server.ops.cuda.sampler.{name}", value)
    return SamplerRig(host_driver(), images, vocab_size, max_rows)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 2**31 - 1), (0x123456789ABCDEF0, 4711)])
def test_noise_is_that_of_the_definition(seed: int, position: int) -> None:
    driver = host_driver()
    parameters = {"ids": "*i32", "out": "*fp32", "position": "i32", "seed_low": "i32", "seed_high": "i32"}
    kernel = Kernels(driver, driver.create_stream(), [image("noise", parameters, 256)]).get("noise")
    ids = torch.randint(0, 2**18, (256,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    out = allocate_buffer(driver, (256,), "float32")
    halves = torch.tensor([seed & 0xFFFFFFFF, seed >> 32]).to(torch.int32).tolist()
    kernel((1, 1, 1), to_device(driver, ids), out, position, *halves)
    expected = torch.tensor([gumbel(seed, position, token_id) for token_id in ids.tolist()], dtype=torch.float64)
    # The definition rounds v to fp32, which the reference does not: up to 2^-25 of v near 1, where noise is least.
    assert (as_tensor(out).double() - expected).abs().max() < 1e-6


def test_noise_of_extreme_words_is_as_exact_as_fp32_can_be() -> None:
    driver = host_driver()
    kernel = Kernels(
        driver, driver.create_stream(), [image("noise_of_words", {"words": "*i32", "out": "*fp32"}, 1024)]
    ).get("noise_of_words")
    near_ends = [0, 1, 2, 3, 255, 256, 257, 2**31 - 1, 2**31, 2**32 - 300, 2**32 - 2, 2**32 - 1]
    powers = [word for shift in range(32) for word in (2**shift - 1, 2**shift, 2**32 - 2**shift)]
    words = near_ends + powers + Random(0).choices(range(2**32), k=1024 - len(near_ends) - len(powers))
    out = allocate_buffer(driver, (1024,), "float32")
    kernel((1, 1, 1), to_device(driver, torch.tensor(words).to(torch.int32)), out)
    uniform = ((torch.tensor(words).float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    expected = -(-(-uniform.double()).log1p()).log()
    result = as_tensor(out)
    assert ((result - expected).abs() <= 5e-7 + 1.5e-7 * expected.abs()).all()
    # Between these bounds lies all noise: what HOPELESS builds on.
    assert result.max() < 22.88
    assert result.min() > -2.82
    in_torch = -(-(-uniform).log1p()).log()
    assert (result - in_torch).abs().max() < 3e-6


def test_hopeless_scores_lose_against_the_largest_whatever_the_noise_is() -> None:
    assert sample.HOPELESS.value + 22.88 < -2.82


def kept_in_double(scores: Tensor, row: SlotSampling) -> Tensor:
    """Which ids step 5 keeps, of those that can win: z in fp32, everything else in float64."""
    z = ((scores - scores.max()) / row.temperature).double()
    threshold = torch.tensor(float("-inf"), dtype=torch.float64)
    descending = z.sort(descending=True).values
    if 0 < row.top_k < len(z):
        threshold = descending[row.top_k - 1]
    if row.top_p < 1:
        masses = descending[descending >= threshold].exp()
        before = (masses.cumsum(0) - masses) / masses.sum()
        threshold = descending[max(1, int((before < torch.tensor(row.top_p).double()).sum())) - 1]
    if row.min_p > 0:
        threshold = max(threshold, torch.tensor(row.min_p).double().log())
    return (z >= threshold) & (z >= sample.HOPELESS.value)


@pytest.mark.parametrize("shape", ["normal", "ties", "narrow", "peaked", "outliers"])
def test_searches_keep_exactly_what_the_definition_keeps(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Sixteen candidates and 128 scores at a time: passes narrow the bracket first."""
    num_rows, vocab_size = 8, 500
    random, generator = Random(shape), torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if shape == "ties":
        logits = logits.round()
    elif shape == "narrow":
        logits = 20 + logits * 1e-3
    elif shape == "peaked":
        logits[:, 77] = 40.0
    elif shape == "outliers":
        logits[:, ::7] *= 1e25
        logits[:, 3:200] = float("-inf")
    rows = [
        sampling(
            temperature=random.choice([0.1, 1.0, 1.0, 3.0]),
            top_k=random.choice([0, 1, 2, 17, 40, 300, 499, 500, 9999]),
            top_p=random.choice([1.0, 0.05, 0.5, 0.9, 0.999]),
            min_p=random.choice([0.0, 0.0, 0.1]),
        )
        for _ in range(num_rows)
    ]
    rig = small_rig(monkeypatch, vocab_size, num_rows)
    result = rig.run(logits, rows, [1] * num_rows)
    floors = rig.download(rig.sampler._floors)
    for index, row in enumerate(rows):
        scores = logits[index]
        z = (scores - scores.max()) / row.temperature
        expected = kept_in_double(scores, row)
        assert torch.equal(z >= floors[index], expected), (index, row)
        drawn = z + gumbel_noise_of(row, vocab_size)
        assert result.token_ids[index] == int(drawn.masked_fill(~expected, float("-inf")).argmax())


def gumbel_noise_of(row: SlotSampling, vocab_size: int) -> Tensor:
    """Noise at position 1, from the torch backend."""
    seed = torch.tensor([row.seed])
    unused = torch.zeros(1)
    params = dataclasses.make_dataclass("Seeds", ["seed_low", "seed_high", "top_p"])(seed, seed * 0, unused)
    return gumbel_noise(params, torch.tensor([1]), vocab_size)[0]


def test_rows_of_many_tiles_are_reduced_in_several_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 128 * 130 + 5
    rows = [sampling(), sampling(temperature=2.0, top_p=0.3)]
    logits = torch.zeros(2, vocab_size)
    logits[0, [128 * 128 + 1, 128 * 129]] = 1.0
    logits[1, [128 * 130 + 4, 3]] = 40.0
    rig = small_rig(monkeypatch, vocab_size, 2)
    result = rig.run(logits, rows, [0, 0])
    assert result.token_ids[0] == 128 * 128 + 1
    assert result.token_ids[1] in (3, 128 * 130 + 4)
    assert result.logprobs == pytest.approx(
        [float(logits[i].double().log_softmax(0)[result.token_ids[i]]) for i in range(2)], abs=1e-5
    )


def test_small_tiles_choose_what_large_ones_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = every_kind(10, Random(2))
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(1)) * 2
    large = SamplerRig(host_driver(), interpreted_images(), 300, 10).run(logits, rows, [45] * 10)
    small = small_rig(monkeypatch, 300, 10).run(logits, rows, [45] * 10)
    assert small.token_ids == large.token_ids
    assert small.logprobs == pytest.approx(large.logprobs, abs=1e-5)
