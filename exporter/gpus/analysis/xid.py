"""Meaning of NVIDIA's Xid codes: a fault of the device, its firmware, the program, or none."""

from typing import Literal, NamedTuple

# ``hardware``: fault of memory, bus or links. ``reset``: the device stopped, and a reset helps. ``application``: fault
# of a program, which ends with it. ``noise``: harmless, or a side effect of another error.
XidClass = Literal["hardware", "reset", "application", "noise"]

# The device stays suspect; other errors end with the program that caused them.
LASTING: tuple[XidClass, ...] = ("hardware", "reset")
NOISE: XidClass = "noise"

# Classes follow the advised action in NVIDIA's Xid catalogue, https://docs.nvidia.com/deploy/xid-errors (Ampere and
# later). Code 61 is from https://docs.nvidia.com/deploy/gpu-debug-guidelines, 63 from
# https://docs.nvidia.com/deploy/dynamic-page-retirement. Of 56, 167, 171 and 172 NVIDIA gives only the names, in
# nverror.h of open-gpu-kernel-modules.


class XidCode(NamedTuple):
    """One code: class and our description."""

    kind: XidClass
    meaning: str
    # Why no program can continue on the device. Empty if one may, as after a recovered NVLink error: then an end may
    # have another cause.
    fatal_reason: str = ""


_UNANSWERED = "calls to it hang"
_SPOILT = "the driver ends every program that uses it"


XIDS: dict[int, XidCode] = {
    8: XidCode("application", "work on it took too long and was stopped"),
    11: XidCode("application", "invalid commands"),
    13: XidCode("application", "exception in a kernel, such as an access out of bounds"),
    14: XidCode("noise", "error that was triggered on purpose"),
    25: XidCode("application", "invalid commands"),
    31: XidCode("application", "invalid address"),
    32: XidCode("application", "invalid commands, or an error while fetching them"),
    37: XidCode("noise", "call that the firmware does not support"),
    38: XidCode("noise", "watchdog of the driver's firmware"),
    43: XidCode("noise", "work of a program was ended after an error of its own"),
    44: XidCode("noise", "fault during a context switch"),
    45: XidCode("noise", "work of a program was removed after an earlier error, or because it was killed"),
    46: XidCode("reset", "it has stopped processing", fatal_reason="it no longer runs anything"),
    48: XidCode("hardware", "uncorrectable memory error", fatal_reason=_SPOILT),
    54: XidCode("hardware", "auxiliary power is not connected or too low"),
    56: XidCode("noise", "error of the display engine"),
    61: XidCode("reset", "its microcontroller has stopped at a breakpoint"),
    62: XidCode("reset", "its microcontroller has halted", fatal_reason=_UNANSWERED),
    63: XidCode("noise", "a row of memory was remapped or a page retired; in force after the next reset"),
    64: XidCode("hardware", "a row of memory could not be remapped, or a page could not be retired"),
    66: XidCode("noise", "call that the driver does not allow"),
    67: XidCode("noise", "call that the firmware could not verify"),
    68: XidCode("application", "error of a video decoder"),
    69: XidCode("application", "invalid commands for the graphics engine"),
    74: XidCode("hardware", "NVLink error"),
    78: XidCode("noise", "virtual GPU could not be started"),
    79: XidCode("hardware", "fallen off the bus", fatal_reason=_UNANSWERED),
    80: XidCode("application", "corrupted commands"),
    82: XidCode("application", "error of the JPEG decoder"),
    92: XidCode("noise", "many corrected memory errors"),
    93: XidCode("noise", "its settings memory is worn out"),
    94: XidCode(
        "hardware",
        "uncorrectable memory error that affected only this program",
        fatal_reason="the driver ends the affected program",
    ),
    95: XidCode("hardware", "uncorrectable memory error that may affect any program", fatal_reason=_SPOILT),
    106: XidCode("noise", "test message"),
    107: XidCode("noise", "test message"),
    108: XidCode("noise", "address of another GPU that is not valid there"),
    109: XidCode("reset", "context switch took too long"),
    110: XidCode("reset", "error of its security processor"),
    119: XidCode("reset", "its firmware (GSP) does not answer", fatal_reason=_UNANSWERED),
    120: XidCode("reset", "error of its firmware (GSP)", fatal_reason=_UNANSWERED),
    121: XidCode("noise", "corrected error of the link to the CPU"),
    136: XidCode("hardware", "NVLink could not be started"),
    137: XidCode("noise", "access over NVLink to an address that is not valid there"),
    140: XidCode("hardware", "uncorrectable memory error that was not contained", fatal_reason=_SPOILT),
    141: XidCode("noise", "error on a fast path"),
    142: XidCode("application", "error of a video encoder"),
    143: XidCode("reset", "it could not be initialized"),
    144: XidCode("hardware", "NVLink error"),
    145: XidCode("hardware", "NVLink error"),
    146: XidCode("hardware", "NVLink error"),
    147: XidCode("noise", "NVLink error that was handled"),
    148: XidCode("noise", "NVLink error that was handled"),
    149: XidCode("hardware", "NVLink error: a link is down or loses data"),
    150: XidCode("hardware", "NVLink error"),
    151: XidCode("reset", "confidential computing keys could not be renewed"),
    # Also sent when the action returns to none. The driver reports the action itself elsewhere.
    154: XidCode("noise", "the requested recovery action has changed"),
    155: XidCode("reset", "NVLink error that the driver detected"),
    156: XidCode("reset", "a faulty part of it was retired; in force after the next reset"),
    157: XidCode("noise", "a faulty part of it could not be retired"),
    158: XidCode("reset", "it does not answer in time"),
    160: XidCode("noise", "a channel was retired"),
    161: XidCode("noise", "a channel could not be retired"),
    167: XidCode("hardware", "PCIe does not answer in time"),
    171: XidCode("hardware", "uncorrectable error of its memory"),
    172: XidCode("hardware", "uncorrectable error of its caches"),
}  # the relevant codes; engines with many codes follow below

_COPIES = XidCode("application", "error of a copy engine")
_VIDEO = XidCode("application", "error of a video or image engine")
XIDS |= dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), _COPIES)
XIDS |= dict.fromkeys((83, 84, 86, 88, 89, *range(96, 106), 139), _VIDEO)

# Code missing from the table: counted and shown, but never a failure, as it may be a harmless new message. A faulty
# device shows in other values too.
UNKNOWN = XidCode("noise", "error unknown to this version of gpujob")

# Codes after which a GPU is unusable until someone acts. Other ``hardware`` and ``reset`` codes are rare or visible
# in other values.
PAGING_XIDS = (46, 48, 62, 64, 74, 79, 95, 119, 120)
# Counted from 0, because ``increase()`` misses the first value of a new series.
KNOWN_XIDS = tuple(sorted({*PAGING_XIDS, 13, 31, 43, 45, 94}))

# Hardware errors that the driver confined to one program: other programs can continue.
CONTAINED_XIDS = frozenset({94})
# Codes of ``application`` that the catalogue attributes to the program. Errors of copy and video engines may come from
# any program.
PROGRAM_FAULT_XIDS = frozenset({11, 13, 25, 31, 32, 69, 80})


def xid_code(code: int) -> XidCode:
    """Entry of a code; UNKNOWN if it is not in the table."""
    return XIDS.get(code, UNKNOWN)


def xid_class(code: int) -> XidClass:
    """Class of a code; ``noise`` if it is unknown."""
    return xid_code(code).kind


def xid_meaning(code: int) -> str:
    """Description of a code, such as ``fallen off the bus``."""
    return xid_code(code).meaning


def is_device_fault(code: int) -> bool:
    """Whether the device or its firmware is at fault."""
    return xid_class(code) in LASTING


def fatal_xid_text(code: int) -> str:
    """Why no program can continue after this code; empty if one may."""
    return xid_code(code).fatal_reason
