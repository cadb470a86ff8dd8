"""Reads a module that XLA compiled, as text: its all-reduces, and what it says to the host."""

import dataclasses
import re

# An instruction: name, shape, opcode. A shape may be a tuple, with layouts that hold parentheses.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (.*?)\s([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\) -> .* \{$")
_BYTES = {"pred": 1, "bf16": 2}

_REDUCTIONS = ("all-reduce", "all-reduce-start", "reduce-scatter")
_HOST_OPCODES = ("infeed", "outfeed", "send", "send-done", "recv", "recv-done")
_HOST_TARGETS = re.compile(r'custom_call_target="([^"]*(?:callback|host|py_func)[^"]*)"', re.I)
_HOST_MEMORY = re.compile(r"\{[^{}]*S\(5\)[^{}]*\}")


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """One all-reduce.

    Attributes:
        bytes: What is reduced, on each core.
        dtypes: The types of its arrays, without repetition.
        is_gradient: Whether any of them is a floating-point array of more than one element.
        in_entry: Whether it runs once a step, and not in a loop or a branch.
    """

    bytes: int
    dtypes: tuple
    is_gradient: bool
    in_entry: bool


def all_reduces(text):
    """Every all-reduce of a compiled module.

    Args:
        text: The module as `HloModule.to_string()` writes it.

    Returns:
        List of `AllReduce`.
    """
    found = []
    for computation, shape, opcode, _ in _instructions(text):
        if opcode not in _REDUCTIONS:
            continue
        arrays = [(dtype, _elements(sizes)) for dtype, sizes in _ARRAY.findall(shape)]
        found.append(
            AllReduce(
                bytes=sum(_width(dtype) * count for dtype, count in arrays),
                dtypes=tuple(sorted({dtype for dtype, _ in arrays})),
                is_gradient=any("f" in dtype and count > 1 for dtype, count in arrays),
                in_entry=computation == "ENTRY",
            )
        )
    return found


def host_transfers(text):
    """Whatever makes a compiled module wait for its host, as a list of short strings.

    Infeeds, outfeeds, sends and receives, custom calls into the host, and buffers in its memory.
    Sends between cores have a channel of their own and do not count.

    Args:
        text: The module as `HloModule.to_string()` writes it.
    """
    found = []
    for _, shape, opcode, rest in _instructions(text):
        to_host = opcode in _HOST_OPCODES
        if opcode.startswith(("send", "recv")):
            to_host = "is_host_transfer=true" in rest
        if to_host:
            found.append(opcode)
        found += [f"custom-call {target}" for target in _HOST_TARGETS.findall(rest)]
        if _HOST_MEMORY.search(shape):
            found.append(f"{opcode} in host memory")
    return found


def faults(text, cores, parameters):
    """What is wrong with a compiled training step, as a list of sentences; empty if nothing is.

    Args:
        text: The module as `HloModule.to_string()` writes it.
        cores: The number of cores that it was compiled for.
        parameters: The number of trainable parameters, whose float32 gradients are reduced.
    """
    gradients = [reduction for reduction in all_reduces(text) if reduction.is_gradient]
    expected = 1 if cores > 1 else 0
    found = [f"It waits for the host: {transfer}." for transfer in host_transfers(text)]
    if len(gradients) != expected:
        found.append(f"It has {len(gradients)} all-reduces of gradients, not {expected}.")
    if not all(reduction.in_entry for reduction in gradients):
        found.append("It reduces gradients inside a loop: more than once an update.")
    if len(gradients) == 1 and gradients[0].bytes < 4 * parameters:
        found.append(f"It reduces less than the float32 gradients of {parameters} parameters.")
    return found


def _instructions(text):
    """Yields (computation, shape, opcode, rest); the entry computation is called "ENTRY"."""
    computation = None
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            computation = "ENTRY" if start.group(1) else start.group(2)
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction:
            yield (computation, *instruction.groups()[1:])


def _elements(sizes):
    count = 1
    for size in filter(None, sizes.split(",")):
        count *= int(size)
    return count


def _width(dtype):
    return _BYTES.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8
