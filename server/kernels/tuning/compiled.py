"""Candidates compiled ahead, in a folder of their own: on any machine, as often as wanted, and each one once.

candidates.json        what was compiled, and what cannot be
sm_90/linear-....cubin
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from server.errors import StartupError
from server.kernels.build import Job, compile_job, compiler_pool, key_maker
from server.kernels.candidates import max_shared_bytes
from server.kernels.manifest import FORMAT, Manifest, ManifestFile, ManifestImage
from server.ops.cuda.driver import KernelImage

if TYPE_CHECKING:
    from server.kernels.catalog import Recipe

_LIST = "candidates.json"


class CompiledCandidates(msgspec.Struct):
    """By the hash of all that went into each: its file, or why there is none."""

    images: dict[str, ManifestImage] = {}
    failures: dict[str, str] = {}


class CandidateFolder:
    """Candidates of one architecture. What was compiled by other sources is not used."""

    def __init__(self, folder: Path, arch: str) -> None:
        self._folder, self._arch = folder, arch
        folder.mkdir(parents=True, exist_ok=True)
        self._compiled = self._read()
        self._key_of = key_maker()
        self._images: dict[str, KernelImage | None] = {}

    def compile(self, recipes: Iterable["Recipe"], num_processes: int, say: Callable[[str], None]) -> None:
        """Whatever is missing of them. What cannot be compiled is no error: it is no candidate."""
        done = self._compiled.images.keys() | self._compiled.failures.keys()
        jobs = {
            key: Job(recipe, self._arch, key)
            for recipe in recipes
            if (key := self._key_of(recipe, self._arch)) not in done
        }
        if not jobs:
            return
        say(f"compiling {len(jobs)} candidates for {self._arch}, {num_processes} at a time")
        try:
            self._compile(list(jobs.values()), max(1, min(num_processes, len(jobs))))
        finally:
            self._write()

    def image(self, recipe: "Recipe") -> KernelImage | None:
        """The same object each time; None if it is not there or takes more shared memory than there is."""
        key = self._key_of(recipe, self._arch)
        if key not in self._images:
            self._images[key] = self._find(key)
        return self._images[key]

    def _find(self, key: str) -> KernelImage | None:
        image = self._compiled.images.get(key)
        if image is None or image.shared_bytes > max_shared_bytes(self._arch):
            return None
        content = ManifestFile(FORMAT, "", "", {}, (), (image,))
        return Manifest(self._folder, content).images(self._arch)[0]

    @property
    def failures(self) -> Sequence[str]:
        """Why there is none of some."""
        return sorted(self._compiled.failures.values())

    def _compile(self, jobs: Sequence[Job], num_workers: int) -> None:
        with compiler_pool(self._folder, num_workers) as pool:
            pending = {pool.submit(compile_job, self._folder, job): job for job in jobs}
            for future in as_completed(pending):
                job = pending[future]
                try:
                    self._compiled.images[job.key] = future.result()
                except StartupError as error:
                    self._compiled.failures[job.key] = str(error).splitlines()[0]

    def _read(self) -> CompiledCandidates:
        try:
            return msgspec.json.decode((self._folder / _LIST).read_bytes(), type=CompiledCandidates)
        except (FileNotFoundError, msgspec.MsgspecError):
            return CompiledCandidates()

    def _write(self) -> None:
        aside = self._folder / f".{_LIST}"
        aside.write_bytes(msgspec.json.encode(self._compiled))
        aside.replace(self._folder / _LIST)
