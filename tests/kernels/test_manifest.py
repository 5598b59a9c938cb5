"""The manifest: what a device is given, what covers a model, and each way in which a folder of kernels can be wrong."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from server.errors import StartupError
from server.kernels import manifest as manifest_module
from server.kernels.manifest import (
    FORMAT,
    ManifestFile,
    ManifestImage,
    ManifestParameter,
    read_manifest,
    source_digests,
)
from server.ops.cuda.driver import Parameter


def an_image(name: str, arch: str, dtype: str | None, **constants: int) -> ManifestImage:
    suffix = "ptx" if arch.startswith("compute") else "cubin"
    file = "-".join([f"{arch}/{name}", str(dtype), *map(str, constants.values())]) + f".{suffix}"
    parameters = (ManifestParameter("x", "*fp32", 16), ManifestParameter("n", "i32", 8))
    return ManifestImage(name, arch, dtype, f"m:{name}", constants, parameters, name, 4, 512, file, 5, "00", file)


def all_images(arch: str) -> list[ManifestImage]:
    dtypes = "bfloat16", "float16"
    return [
        *(an_image("attend", arch, dtype, HEAD_DIM=size) for dtype in dtypes for size in (64, 128)),
        *(an_image("norm", arch, dtype) for dtype in dtypes),
        an_image("mark", arch, None),
    ]


def write(folder: Path, images: list[ManifestImage], **changes: object) -> Path:
    content = ManifestFile(FORMAT, "3.6.0", "b", source_digests(), (), tuple(images))
    for image in images:
        (folder / image.arch).mkdir(exist_ok=True)
        (folder / image.file).write_bytes(b"12345")
    (folder / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(content, **changes)))
    return folder


def test_a_folder_without_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "missing") is None


def test_a_device_gets_its_own_images(tmp_path: Path) -> None:
    manifest = read_manifest(write(tmp_path, all_images("sm_80") + all_images("sm_90") + all_images("compute_80")))
    assert manifest is not None
    assert manifest.archs == ("compute_80", "sm_80", "sm_90")
    images = manifest.images("sm_90")
    assert len(images) == 7
    first = images[0]
    assert (first.name, first.source, first.entry, first.num_warps) == ("attend", "m:attend", "attend", 4)
    assert (first.constants, first.shared_bytes) == ({"HEAD_DIM": 64}, 512)
    assert first.parameters == (Parameter("x", "*fp32", 16), Parameter("n", "i32", 8))
    assert first.path == tmp_path / "sm_90/attend-bfloat16-64.cubin"


@pytest.mark.parametrize("arch", ["sm_86", "sm_103", "sm_120"])
def test_a_device_without_own_images_gets_ptx(tmp_path: Path, arch: str) -> None:
    manifest = read_manifest(write(tmp_path, all_images("sm_90") + all_images("compute_80")))
    assert manifest is not None
    assert {image.path.suffix for image in manifest.images(arch)} == {".ptx"}


@pytest.mark.parametrize(
    ("present", "arch", "advice"),
    [
        ("sm_90", "sm_80", "kernels for sm_90, none that sm_80 can run; run scripts/build-kern"),
        ("compute_80", "sm_75", 'capability 8.0 or more, this one is sm_75; set engine.backend = "torch"'),
    ],
)
def test_a_device_that_can_run_nothing_is_told_what_to_do(tmp_path: Path, present: str, arch: str, advice: str) -> None:
    manifest = read_manifest(write(tmp_path, all_images(present)))
    assert manifest is not None
    with pytest.raises(StartupError, match=re.escape(advice)):
        manifest.images(arch)
    assert not manifest.covers(64, "float16", arch)


def test_a_model_is_covered_if_every_kernel_is_there_for_it(tmp_path: Path) -> None:
    images = all_images("sm_90")
    manifest = read_manifest(write(tmp_path, images))
    assert manifest is not None
    assert all(manifest.covers(size, dtype) for size in (64, 128) for dtype in ("bfloat16", "float16"))
    assert manifest.covers(64, "float16", "sm_90")
    assert not manifest.covers(96, "float16")
    assert not manifest.covers(64, "float32")
    assert not manifest.covers(64, "float16", "sm_86")


@pytest.mark.parametrize("lost", ["attend-float16-64", "norm-float16"])
def test_one_lost_variant_uncovers_its_models_only(tmp_path: Path, lost: str) -> None:
    images = [image for image in all_images("sm_90") if lost not in image.file]
    manifest = read_manifest(write(tmp_path, images))
    assert manifest is not None
    assert not manifest.covers(64, "float16")
    assert manifest.covers(64, "bfloat16")
    assert manifest.covers(128, "float16") == (lost != "norm-float16")


def test_one_complete_architecture_covers_a_model(tmp_path: Path) -> None:
    manifest = read_manifest(write(tmp_path, all_images("sm_80")[2:] + all_images("sm_90")))
    assert manifest is not None
    assert manifest.covers(64, "bfloat16")
    assert not manifest.covers(64, "bfloat16", "sm_80")


def test_a_folder_without_images_covers_nothing(tmp_path: Path) -> None:
    manifest = read_manifest(write(tmp_path, []))
    assert manifest is not None
    assert not manifest.covers(64, "float16")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a kernel manifest of format 1: Input data was truncated"),
        (b'{"format": 1, "images": [', "not a kernel manifest of format 1"),
        (b'{"format": 1, "triton": "3.6.0"}', "missing required field"),
        (b'{"format": 2, "future": []}', "it says format 2"),
        (b"\xff\xfe", "not a kernel manifest"),
    ],
)
def test_a_broken_manifest_names_itself_and_the_fix(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(StartupError, match=rf"{tmp_path}/manifest.json .*{message}.*; run scripts/build-kernels"):
        read_manifest(tmp_path)


def test_kernels_older_than_their_sources_are_refused(tmp_path: Path) -> None:
    sources = source_digests() | {"norm.py": "00"}
    del sources["gate.py"]
    write(tmp_path, all_images("sm_90"), sources=sources | {"gone.py": "00"})
    with pytest.raises(
        StartupError, match=r"other sources: gate.py, gone.py, norm.py changed since; run scripts/build"
    ):
        read_manifest(tmp_path)


def test_a_lost_or_cut_off_file_is_named(tmp_path: Path) -> None:
    images = all_images("sm_90")
    manifest = read_manifest(write(tmp_path, images))
    assert manifest is not None
    (tmp_path / images[1].file).write_bytes(b"123")
    with pytest.raises(StartupError, match=rf"{images[1].file} has 3 bytes instead of 5; run scripts/build-kernels"):
        manifest.images("sm_90")
    (tmp_path / images[1].file).unlink()
    with pytest.raises(StartupError, match=rf"{images[1].file}: No such file or directory; run scripts/build-kernels"):
        manifest.images("sm_90")


def test_a_manifest_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(StartupError, match=r"manifest.json: Is a directory; run scripts/build-kernels"):
        read_manifest(tmp_path)


def test_reading_it_needs_neither_triton_nor_torch() -> None:
    code = (
        "import sys, pathlib, server.kernels.manifest as m; m.read_manifest(pathlib.Path('missing'));"
        "sys.exit(' '.join({'triton', 'torch', 'numpy', 'cuda'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""


def test_sources_are_the_kernels_and_not_what_builds_them() -> None:
    names = source_digests().keys()
    assert {"embed.py", "norm.py", "rotary.py", "gate.py", "gather.py"} <= names
    assert not {f"{name}.py" for name in manifest_module._NO_KERNELS} & names
