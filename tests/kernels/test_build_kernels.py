"""scripts/build-kernels: what it builds, keeps and removes. The quick tests have a stand-in for the compiler."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from server.errors import StartupError
from server.kernels import build as build_module
from server.kernels.build import ALL_ARCHS, Job, archs_present, build, main
from server.kernels.cubin import read_cubin, read_ptx
from server.kernels.manifest import Manifest, ManifestImage, decode_manifest, read_manifest
from server.kernels.spec import EARLY
from tests.ops.host_kernels import all_recipes

ROOT = Path(__file__).parents[2]
C_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "fp32": ctypes.c_float}


class StandIn:
    """Compiles to the job's own key, and knows what it was asked for."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(self, folder: Path, jobs: Sequence[Job], num_processes: int) -> list[ManifestImage]:
        self.jobs = list(jobs)
        return [build_module._save(folder, job, job.key.encode(), 0) for job in jobs]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(build_module, "_compile_all", stand_in)
    return stand_in


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the nvidia-smi in PATH print something."""

    def install(script: str) -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")

    return install


def content(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("*/*")}


# Which architectures


def test_the_gpus_that_are_there_decide(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('printf "9.0\\n9.0\\n8.6\\n12.0\\n7.5\\n[N/A]\\n"')
    assert archs_present() == ("compute_80", "sm_86", "sm_90")


@pytest.mark.parametrize("script", ["exit 9", 'echo "NVIDIA-SMI has failed"'])
def test_no_working_driver_is_no_gpu(nvidia_smi: Callable[[str], None], script: str) -> None:
    nvidia_smi(script)
    assert archs_present() == ()


def test_a_machine_without_gpu_builds_nothing_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--out", str(tmp_path / "out")]) == 0
    assert "no GPU of capability 8.0 or more" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_interpreted_kernels_are_not_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--arch", "sm_90", "--out", str(tmp_path)]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


def test_a_partial_build_does_not_replace_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--one-variant", "--all"])
    assert "--one-variant needs --out" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    (tmp_path / "file").touch()
    assert main(["--arch", "sm_90", "--out", str(tmp_path / "file" / "out")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


# What is kept


def test_an_unchanged_kernel_is_kept(compiler: StandIn, tmp_path: Path) -> None:
    build(tmp_path, ["sm_90"], 1)
    assert len(compiler.jobs) == len(all_recipes())
    compiler.jobs = []
    build(tmp_path, ["sm_90"], 1)
    build(tmp_path, [], 1)
    assert compiler.jobs == []
    assert len(content(tmp_path).images("sm_90")) == len(all_recipes())


def test_only_what_is_missing_is_compiled(compiler: StandIn, tmp_path: Path) -> None:
    build(tmp_path, ["sm_90"], 1)
    build(tmp_path, ["sm_90", "compute_80"], 1)
    assert {job.arch for job in compiler.jobs} == {"compute_80"}
    assert content(tmp_path).archs == ("compute_80", "sm_90")


def test_other_architectures_stay(compiler: StandIn, tmp_path: Path) -> None:
    build(tmp_path, ["sm_80", "sm_90"], 1)
    build(tmp_path, ["sm_86"], 1)
    assert content(tmp_path).archs == ("sm_80", "sm_86", "sm_90")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x" * path.stat().st_size)])
def test_a_damaged_file_is_compiled_again(compiler: StandIn, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    build(tmp_path, ["sm_90"], 1)
    damage(tmp_path / content(tmp_path).content.images[3].file)
    build(tmp_path, ["sm_90"], 1)
    assert compiler.jobs == [job for job in build_module._jobs(["sm_90"], False) if job.recipe == all_recipes()[3]]


def test_a_changed_source_leaves_other_kernels_and_drops_old_files(
    compiler: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, ["sm_80", "sm_90"], 1)
    before = files(tmp_path)
    original = build_module._module_digest
    monkeypatch.setattr(build_module, "_module_digest", lambda name: name if name == "norm" else original(name))
    current = build_module.source_digests()
    monkeypatch.setattr(build_module, "source_digests", lambda: current | {"norm.py": "changed"})
    build(tmp_path, ["sm_90"], 1)
    assert {job.recipe.module for job in compiler.jobs} == {"norm"}
    after = files(tmp_path)
    assert {name.split("/")[0] for name in after} == {"sm_90"}, "an architecture with old kernels is left out"
    assert len(after) == len(all_recipes())
    assert len(after & before) == len(all_recipes()) - len(compiler.jobs)


def test_another_compiler_compiles_everything(
    compiler: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, ["sm_90"], 1)
    monkeypatch.setattr(build_module, "version", lambda _: "3.7.0")
    build(tmp_path, ["sm_90"], 1)
    assert len(compiler.jobs) == len(all_recipes())


def test_a_manifest_that_cannot_be_read_is_replaced(compiler: StandIn, tmp_path: Path) -> None:
    build(tmp_path, ["sm_90"], 1)
    (tmp_path / "manifest.json").write_bytes(b"{")
    build(tmp_path, ["sm_90"], 1)
    assert len(compiler.jobs) == len(all_recipes())
    assert content(tmp_path).covers(64, "float16")


def test_a_failed_build_leaves_the_manifest(compiler: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, ["sm_90"], 1)
    before = (tmp_path / "manifest.json").read_bytes()

    def fail(*_: object) -> list[ManifestImage]:
        raise StartupError("kernel gate cannot be compiled")

    monkeypatch.setattr(build_module, "_compile_all", fail)
    with pytest.raises(StartupError):
        build(tmp_path, ["sm_90", "sm_80"], 1)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_a_source_that_changes_meanwhile_fails_the_build(
    compiler: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter([{"norm.py": "before"}, {"norm.py": "after"}])
    monkeypatch.setattr(build_module, "source_digests", lambda: next(digests))
    with pytest.raises(StartupError, match="changed while they were compiled"):
        build(tmp_path, ["sm_90"], 1)
    assert not (tmp_path / "manifest.json").exists()


def test_left_overs_are_removed(compiler: StandIn, tmp_path: Path) -> None:
    (tmp_path / "sm_90").mkdir()
    (tmp_path / "sm_90" / ".gate.cubin.123").touch()
    (tmp_path / "sm_90" / "old.cubin").touch()
    (tmp_path / ".triton-abc" / "x").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    build(tmp_path, ["sm_90"], 1)
    assert len(files(tmp_path)) == len(all_recipes()) + 1
    assert (tmp_path / "mine" / "notes").exists()
    assert not (tmp_path / ".triton-abc").exists()


def test_a_partial_build_is_the_first_variant_of_each_kernel(compiler: StandIn, tmp_path: Path) -> None:
    build(tmp_path, ["sm_80"], 1, is_partial=True)
    names = [image.name for image in content(tmp_path).images("sm_80")]
    assert sorted(names) == sorted({recipe.name for recipe in all_recipes()})
    build(tmp_path, ["sm_80"], 1)
    assert len(compiler.jobs) == len(all_recipes()) - len(names), "it does not count as complete"


def test_a_digest_covers_what_a_source_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "a": "from server.kernels.b import f",
        "b": "from server.kernels import c",
        "c": "import triton",
        "d": "import server.kernels.a",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(build_module, "kernel_files", lambda: tuple(sorted(tmp_path.glob("*.py"))))
    before = {name: build_module._module_digest(name) for name in sources}
    (tmp_path / "c.py").write_text("import triton  # changed")
    changed = {name for name in sources if build_module._module_digest(name) != before[name]}
    assert changed == {"a", "b", "c", "d"}
    before = {name: build_module._module_digest(name) for name in sources}
    (tmp_path / "d.py").write_text("")
    assert {name for name in sources if build_module._module_digest(name) != before[name]} == {"d"}


# What a compiled file says


PTX = """
.visible .entry scale(
    .param .u64 .ptr .global .align 16 scale_param_0,
    .param .u32 scale_param_1,
    .param .f32 scale_param_2,
    .param .u64 .ptr .global .align 1 scale_param_3
)
.reqntid 128
{ ld.param.b64 %rd1, [scale_param_0]; }
"""


def test_ptx_names_its_entry_and_parameters() -> None:
    entry = read_ptx(PTX)
    assert (entry.name, entry.layout) == ("scale", ((0, 8), (8, 4), (12, 4), (16, 8)))


def test_ptx_parameters_lie_at_multiples_of_their_size() -> None:
    assert read_ptx(".visible .entry k(.param .u32 a, .param .u64 b)").layout == ((0, 4), (8, 8))


@pytest.mark.parametrize("text", ["", PTX + PTX])
def test_ptx_of_other_than_one_kernel_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="one kernel was expected"):
        read_ptx(text)


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01\x01" + bytes(58), PTX.encode()])
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no 64-bit little-endian ELF file"):
        read_cubin(data)


# With the real compiler, in processes where kernels are not interpreted


def run_build(*arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment["PATH"] = "/nonexistent"  # no C compiler is needed
    command = [sys.executable, "-m", "server.kernels.build", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All kernels for sm_90; one variant of each for every architecture."""
    folder = tmp_path_factory.mktemp("built")
    run_build("--arch", "sm_90", "--out", str(folder / "all"))
    run_build("--all", "--one-variant", "--out", str(folder / "one"))
    return folder / "all", folder / "one"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_architecture_compiles(built: tuple[Path, Path]) -> None:
    complete, partial = map(content, built)
    assert complete.archs == complete.content.archs == ("sm_90",)
    assert all(complete.covers(size, dtype, "sm_90") for size in (64, 128) for dtype in ("bfloat16", "float16"))
    assert len(complete.images("sm_90")) == len(all_recipes())
    assert sum(image.num_bytes for image in complete.content.images) < 50 << 20
    assert set(partial.archs) == set(ALL_ARCHS)
    assert partial.content.archs == ()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_compiled_file_takes_the_arguments_of_its_manifest(built: tuple[Path, Path]) -> None:
    for folder in built:
        manifest = content(folder)
        for image in manifest.content.images:
            data = (folder / image.file).read_bytes()
            function = getattr(import_module(f"server.kernels.{image.source.partition(':')[0]}"), image.entry)
            assert image.waits == (EARLY in function.arg_names and image.arch in ("sm_90", "sm_100"))
            is_ptx = image.file.endswith(".ptx")
            found = read_ptx(data.decode()) if is_ptx else read_cubin(data)
            types = [ctypes.c_void_p if p.type.startswith("*") else C_TYPES[p.type] for p in image.parameters]
            fields = [(f"p{index}", kind) for index, kind in enumerate([*types, ctypes.c_void_p, ctypes.c_void_p])]
            layout = type("Layout", (ctypes.Structure,), {"_fields_": fields})
            expected = tuple((getattr(layout, name).offset, getattr(layout, name).size) for name, _ in fields)
            assert (found.name, found.layout) == (image.entry, expected), image.file


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_unchanged_build_costs_nothing(built: tuple[Path, Path]) -> None:
    complete, _ = built
    before = {path: path.stat().st_mtime_ns for path in complete.rglob("*") if path.is_file() and path.name != ".lock"}
    begin = time.monotonic()
    assert "up to date" in run_build("--arch", "sm_90", "--out", str(complete))
    assert time.monotonic() - begin < 5
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(complete.glob(".triton-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rotations_use_sines_that_are_right_for_large_angles(built: tuple[Path, Path]) -> None:
    image = next(i for i in content(built[1]).content.images if i.name == "rotate_and_store" and i.file.endswith("ptx"))
    ptx = (built[1] / image.file).read_text()
    assert "__cudart_i2opi_f" in ptx, "the bits of 2 / pi, with which libdevice reduces arguments above 1e5"
    assert "sin.approx" not in ptx
    assert "cos.approx" not in ptx


REFUSALS = """
from dataclasses import replace
from server.errors import StartupError
from server.kernels import compiler
from server.kernels.catalog import all_specs, expand
from server.ops.cuda.driver import Parameter

recipe = next(r for spec in all_specs() if spec.name == "gather_rows" for r in expand(spec))

def refused(arch, **changes):
    try:
        compiler.compile_recipe(replace(recipe, **changes), arch)
    except StartupError as error:
        print(str(error).splitlines()[0])
    else:
        print("compiled")

refused("sm_90")
refused("compute_80")
refused("sm_90", parameters=recipe.parameters[::-1])
refused("sm_90", constants={"TILE": 8})
refused("sm_90", parameters=(*recipe.parameters[:3], Parameter("width", "*i32", 16)))
compiler.expected_layout = lambda parameters: ((0, 8),)
refused("sm_90")
refused("compute_80")
"""


@pytest.mark.slow
def test_a_kernel_that_differs_from_its_spec_is_refused() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    result = subprocess.run(
        [sys.executable, "-c", REFUSALS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert lines[:2] == ["compiled", "compiled"]
    assert "its spec has parameters width, out, rows, x and constants BLOCK; gather:gather_rows takes" in lines[2]
    assert "and constants TILE;" in lines[3]
    assert lines[4].startswith("kernel gather_rows (bfloat16, {'BLOCK': 1024}) for sm_90 cannot be compiled")
    for line in lines[5:7]:
        assert "the compiled file has gather_rows with parameters (offset, bytes) ((0, 8), (8, 8), (16, 8), (24" in line
        assert "gather_rows with ((0, 8),) was expected" in line


def test_the_manifest_that_is_written_can_be_decoded(compiler: StandIn, tmp_path: Path) -> None:
    build(tmp_path, ["sm_90"], 1)
    assert decode_manifest((tmp_path / "manifest.json").read_bytes()) == content(tmp_path).content
