"""Every "auto" becomes a choice that suits machine and model, and is logged with its reason."""

import dataclasses
import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import StartupError
from server.kernels.manifest import FORMAT, MANIFEST_FILE, ManifestFile, ManifestImage, source_digests
from server.settings.load import load_settings
from server.settings.machine import Machine
from server.settings.resolve import name_from_path, resolve, runtime_dir, stop_timeouts
from tests.api.service import FACTS

LAPTOP = Machine(num_cores=8, memory_bytes=16 << 30, num_gpus=0, libcuda_path=None, has_torch=True)
GPU_BOX = Machine(
    num_cores=16,
    memory_bytes=16 << 30,
    num_gpus=2,
    libcuda_path="/usr/lib/libcuda.so.1",
    has_torch=True,
    torch_has_cuda=True,
    has_cuda_bindings=True,
    has_cublas=True,
)
HALF = dataclasses.replace(FACTS, dtype="bfloat16", hidden_size=256, head_dim=64, vocab_size=4096)


def resolved(machine=LAPTOP, facts=FACTS, kernels=None, **overrides):
    chosen = {name.replace("__", "."): value for name, value in overrides.items()}
    return resolve(load_settings("demo", {}, chosen), facts, machine, kernels)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A manifest that covers head_dim 64 in bfloat16."""
    folder = tmp_path_factory.mktemp("built")
    image = ManifestImage(
        name="attention",
        arch="sm_90",
        dtype="bfloat16",
        source="attention.py",
        constants={"HEAD_DIM": 64},
        parameters=(),
        entry="attention",
        num_warps=4,
        shared_bytes=0,
        file="sm_90/attention.cubin",
        num_bytes=0,
        sha256="",
        key="",
    )
    content = ManifestFile(FORMAT, "3.6.0", "", source_digests(), ("sm_90",), (image,))
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(content))
    return folder


def server_settings(**overrides):
    return load_settings("demo", {}, {f"server.{name}": value for name, value in overrides.items()}).server


def test_laptop_serves_on_all_its_cores():
    config = resolved()
    assert (config.backend, config.device, config.num_threads) == ("torch", "cpu", 8)
    assert config.kv_pool_bytes == 256 << 20
    assert config.max_model_len == FACTS.max_position
    assert config.served_name == "demo"


def test_a_kv_pool_larger_than_the_machine_is_refused():
    with pytest.raises(StartupError, match=r"kv\.pool_mib is 16385, but this machine has 16384 MiB"):
        resolved(kv__pool_mib=16385)
    assert resolved(GPU_BOX, kv__pool_mib=16385).kv_pool_bytes == 16385 << 20


def test_gpu_is_taken_where_there_is_one(kernels):
    config = resolved(GPU_BOX)
    assert (config.backend, config.device, config.num_threads) == ("torch", "cuda", 1)  # the model is in float32
    assert config.kv_pool_bytes is None
    for wish in ("auto", "cuda"):
        config = resolved(GPU_BOX, HALF, kernels, engine__backend=wish)
        assert (config.backend, config.device, config.num_threads) == ("cuda", "cuda", 1)


def test_cuda_backend_needs_no_torch(kernels):
    assert resolved(dataclasses.replace(GPU_BOX, has_torch=False), HALF, kernels).backend == "cuda"


@pytest.mark.parametrize(
    ("machine", "facts", "reason"),
    [
        ({}, {"dtype": "float32"}, "the weights are float32"),
        ({}, {"head_dim": 80}, "head_dim is 80"),
        ({}, {"head_dim": 128}, "head_dim 128 in bfloat16"),
        ({}, {"dtype": "float16"}, "head_dim 64 in float16"),
        ({}, {"num_heads": 18, "num_kv_heads": 2}, "9 query heads share a KV head; the cuda backend serves up to 8"),
        ({}, {"intermediate_size": 72, "num_heads": 4, "num_kv_heads": 2}, "intermediate_size per block is 36"),
        ({}, {"vocab_size": 128257}, "vocab_size is 128257; the cuda backend needs a multiple of 8"),
        ({"has_cublas": False}, {}, "cuBLAS 13 is not installed: install the extra cuda"),
        ({"num_gpus": 0}, {}, "the device is the CPU"),
    ],
)
def test_what_the_cuda_backend_lacks_is_named(kernels, caplog, machine, facts, reason):
    box, model = dataclasses.replace(GPU_BOX, **machine), dataclasses.replace(HALF, **facts)
    with caplog.at_level(logging.INFO, "server.settings"):
        assert resolved(box, model, kernels).backend == "torch"
    assert any("engine.backend: torch" in text and reason in text for text in caplog.messages)
    with pytest.raises(StartupError) as refusal:
        resolved(box, model, kernels, engine__backend="cuda")
    assert reason in str(refusal.value)
    assert '"cuda"' in str(refusal.value)
    with pytest.raises(StartupError, match="PyTorch, which is not installed: install the extra torch") as refusal:
        resolved(dataclasses.replace(box, has_torch=False), model, kernels)
    assert reason in str(refusal.value)


def test_kernels_that_were_not_built_are_named_with_the_fix(tmp_path):
    with pytest.raises(StartupError, match=r"no compiled kernels are in .*: run scripts/build-kernels"):
        resolved(GPU_BOX, HALF, tmp_path, engine__backend="cuda")
    (tmp_path / MANIFEST_FILE).write_text("{")
    with pytest.raises(StartupError, match="scripts/build-kernels"):
        resolved(GPU_BOX, HALF, tmp_path)
    assert resolved(GPU_BOX, HALF, tmp_path, engine__device="cpu").backend == "torch"  # they are not looked at


def test_a_fault_is_searched_for_by_a_setting():
    assert not load_settings("demo", {}).debug.sync_launches
    assert load_settings("demo", {"MODEL_SERVER_DEBUG__SYNC_LAUNCHES": "true"}).debug.sync_launches


def test_nothing_begins_early_unless_asked_to():
    assert not load_settings("demo", {}).debug.early_launch
    assert load_settings("demo", {"MODEL_SERVER_DEBUG__EARLY_LAUNCH": "true"}).debug.early_launch


def test_wishes_are_followed():
    config = resolved(
        GPU_BOX,
        engine__device="cpu",
        engine__backend="torch",
        engine__num_threads=3,
        engine__max_model_len=100,
        kv__pool_mib=7,
        model__served_name="mine",
    )
    assert (config.backend, config.device, config.num_threads) == ("torch", "cpu", 3)
    assert (config.max_model_len, config.kv_pool_bytes) == (100, 7 << 20)
    assert config.served_name == "mine"


def test_step_has_room_for_a_token_of_every_request():
    assert resolved().max_batched_tokens == 256
    assert resolved(engine__max_num_requests=300).max_batched_tokens == 300
    assert resolved(engine__max_num_requests=300, engine__max_batched_tokens=301).max_batched_tokens == 301


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [
        (LAPTOP, {}, (256, 256)),
        (GPU_BOX, {}, (256, 2048)),
        (GPU_BOX, {"engine__max_batched_tokens": 3000}, (3000, 3000)),
        (GPU_BOX, {"engine__usual_batched_tokens": 192}, (192, 2048)),
        (LAPTOP, {"engine__max_prefill_tokens": 100}, (256, 100)),
    ],
)
def test_steps_of_prompts_alone_are_longer_on_a_gpu(machine, overrides, expected):
    config = resolved(machine, **overrides)
    assert (config.usual_batched_tokens, config.max_prefill_tokens) == expected


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [
        (GPU_BOX, {"engine__backend": "cuda"}, 'engine.backend is "cuda", but the weights are float32'),
        (LAPTOP, {"engine__backend": "cuda"}, "the device is the CPU"),
        (dataclasses.replace(GPU_BOX, has_cuda_bindings=False), {}, "package cuda-bindings, which is not installed"),
        (dataclasses.replace(GPU_BOX, torch_has_cuda=False), {}, "found one for CPUs only"),
        (dataclasses.replace(GPU_BOX, torch_has_cuda=False), {"engine__backend": "torch"}, "found one for CPUs only"),
        (LAPTOP, {"engine__device": "cuda"}, "no /dev/nvidia0"),
        (dataclasses.replace(GPU_BOX, libcuda_path=None), {"engine__device": "cuda"}, "no libcuda.so.1"),
        (dataclasses.replace(LAPTOP, has_torch=False), {}, "PyTorch, which is not installed"),
        (LAPTOP, {"engine__max_model_len": 513}, "engine.max_model_len is 513"),
        (LAPTOP, {"server__lame_duck_s": 30}, "server.lame_duck_s is 30"),
        (LAPTOP, {"engine__usual_batched_tokens": 257}, "engine.max_batched_tokens is 256"),
    ],
)
def test_wish_that_cannot_be_met_is_refused(machine, overrides, expected):
    with pytest.raises(StartupError) as refusal:
        resolved(machine, **overrides)
    assert expected in str(refusal.value)


def test_each_automatic_choice_is_logged_once_with_its_reason(caplog):
    with caplog.at_level(logging.INFO, "server.settings"):
        resolved(dataclasses.replace(GPU_BOX, libcuda_path=None))
    choices = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert sorted(choices) == sorted(set(choices))
    assert {"engine.backend", "engine.device", "engine.num_threads", "engine.max_model_len"} <= set(choices)
    assert any("no libcuda.so.1" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/run/user/1"}, "/run/a"),
        ({"XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/model-server-8000"),
    ],
)
def test_runtime_folder_follows_the_environment(environ, expected):
    assert str(runtime_dir(server_settings(), environ)) == expected


def test_runtime_folder_is_one_per_port_and_user():
    folders = {runtime_dir(server_settings(port=port), {}) for port in (0, 8000, 8001)}
    assert len(folders) == 3
    assert all(folder.parent.name == "tmp" for folder in folders)
    assert runtime_dir(server_settings(runtime_dir="here"), {}).is_absolute()


@given(drain_limit_s=st.integers(1, 1000), lame_duck_s=st.floats(0, 1000))
def test_limits_of_a_stop_are_ordered_or_refused(drain_limit_s, lame_duck_s):
    server = server_settings(drain_limit_s=drain_limit_s, lame_duck_s=lame_duck_s)
    try:
        limits = stop_timeouts(server)
    except StartupError:
        assert lame_duck_s > drain_limit_s - 1
        return
    assert limits.web_s >= 1
    assert lame_duck_s + limits.web_s <= drain_limit_s
    assert limits.lame_duck_s + limits.web_s + 1 < limits.dirty_s < limits.master_s
    assert limits.master_s <= drain_limit_s + 3


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/demo", "demo"),
        ("/srv/models/qwen/", "qwen"),
        ("Qwen/Qwen2-7B-Instruct", "Qwen2-7B-Instruct"),
        ("/hub/models--Qwen--Qwen2-7B/snapshots/0123abc", "Qwen2-7B"),
        ("/hub/models--gpt2", "gpt2"),
        ("/", "/"),
    ],
)
def test_served_name_is_what_people_call_it(path, name):
    assert name_from_path(path) == name
