"""Entry and parameters of a compiled kernel, read from the cubin (ELF) or PTX itself. Knows nothing of Triton.

NVIDIA does not document .nv.info; the attributes here are as cuobjdump -elf prints them, for sm_80 to sm_100.
"""

import re
import struct
from dataclasses import dataclass

# (offset, bytes) of each parameter in the order of the kernel's.
ParameterLayout = tuple[tuple[int, int], ...]

_SECTION = struct.Struct("<IIQQQQIIQQ")
_FORMAT_SIZED = 4  # EIFMT_SVAL: a size and that many bytes; every other format has its value in place of the size
_KPARAM_INFO = 0x17  # EIATTR_KPARAM_INFO
_KPARAM = struct.Struct("<IHHI")  # index, ordinal, offset, flags with the size above bit 18
_PTX_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\(([^)]*)\)")
_PTX_BODY = re.compile(r"^\{(.*)^\}", re.DOTALL | re.MULTILINE)
_PTX_WAIT = "griddepcontrol.wait"
# What changes the order of execution, or touches memory other than parameters, on the lines before a wait.
_PTX_BRANCH = re.compile(r"@|(bra|brx|call|ret|exit|trap)\b")
_PTX_MEMORY = re.compile(
    r"(ldu?|st|atom|red|cp|prefetchu?|ldmatrix|stmatrix|tensormap|mbarrier|fence|membar|multimem|griddepcontrol|tex"
    r"|suld|sust|discard|applypriority)\."
)
# A block's own memory, which no kernel before has: Triton takes tensor memory (sm_100) before the source's first line.
_PTX_OWN_MEMORY = re.compile(r"(@!?%p\d+\s+)?(tcgen05\.(alloc|relinquish_alloc_permit)\.|ld\.shared\.)")
_PTX_LABEL = re.compile(r"^\s*[$\w]+:")
_PTX_PARAMETER = re.compile(r"ld\.param\.")
_PTX_TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True, slots=True)
class CompiledEntry:
    """What a compiled file says of its only kernel."""

    name: str
    layout: ParameterLayout


def read_cubin(data: bytes) -> CompiledEntry:
    """Raises ValueError if `data` is not a cubin with exactly one kernel."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF file")
    sections = _sections(data)
    entries = [name.removeprefix(".nv.info.") for name in sections if name.startswith(".nv.info.")]
    if len(entries) != 1 or f".text.{entries[0]}" not in sections:
        raise ValueError(f"one kernel was expected, found {entries}")
    return CompiledEntry(entries[0], _kernel_parameters(sections[f".nv.info.{entries[0]}"]))


def read_ptx(text: str) -> CompiledEntry:
    """Raises ValueError if `text` is not PTX with exactly one kernel."""
    entries = _PTX_ENTRY.findall(text)
    if len(entries) != 1:
        raise ValueError(f"one kernel was expected, found {[name for name, _ in entries]}")
    name, parameters = entries[0]
    sizes = [_PTX_TYPE_BYTES[bits] for bits in re.findall(r"\.param\s+\.[a-z](\d+)\b", parameters)]
    layout, end = [], 0
    for size in sizes:
        start = -(-end // size) * size
        layout.append((start, size))
        end = start + size
    return CompiledEntry(name, tuple(layout))


def waits_first(text: str) -> bool:
    """Whether PTX with one kernel waits for the kernels before it (griddepcontrol.wait) in every thread.

    Raises ValueError if it does so in a branch, or after an access to memory or the start of the kernels behind.
    """
    body = _PTX_BODY.search(text)
    if body is None or _PTX_WAIT not in body[1]:
        return False
    for line in body[1].splitlines():
        for statement in _statements(line):
            if statement.startswith(_PTX_WAIT):
                return True
            if _PTX_OWN_MEMORY.match(statement):
                continue
            if _PTX_BRANCH.match(statement):
                raise ValueError(f"its wait for the kernels before it comes after a branch: {statement}")
            if _PTX_MEMORY.match(statement) and not _PTX_PARAMETER.match(statement):
                raise ValueError(f"its wait for the kernels before it comes too late: {statement}")
    raise ValueError("its wait for the kernels before it stands in a comment alone")


def _statements(line: str) -> list[str]:
    """Of a line of PTX; braces open scopes of registers. A label alone changes nothing: nobody has branched yet."""
    parts = _PTX_LABEL.sub("", line.partition("//")[0]).replace("{", ";").replace("}", ";").split(";")
    return [part.strip() for part in parts if part.strip()]


def _sections(data: bytes) -> dict[str, bytes]:
    """Contents by name. ELF-64: the section table's place is at 40 of the header, its entries' count at 60."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [_SECTION.unpack_from(data, table + index * entry_bytes) for index in range(count)]
    names_start = headers[names_index][4]
    return {
        data[names_start + name : data.index(b"\0", names_start + name)].decode(): data[offset : offset + size]
        for name, _type, _flags, _address, offset, size, *_rest in headers
    }


def _kernel_parameters(info: bytes) -> ParameterLayout:
    found: dict[int, tuple[int, int]] = {}
    position = 0
    while position + 4 <= len(info):
        value_format, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if value_format != _FORMAT_SIZED:
            continue
        if attribute == _KPARAM_INFO:
            _index, ordinal, offset, flags = _KPARAM.unpack_from(info, position)
            found[ordinal] = (offset, flags >> 18)
        position += size
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"parameters {sorted(found)} are described, not all from 0 on")
    return tuple(found[ordinal] for ordinal in range(len(found)))
