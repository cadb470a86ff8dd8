"""Finds all-reduces and transfers to the host in the text of a compiled XLA module."""

import dataclasses
import re

# An instruction: name, shape, opcode. A shape may be a tuple; its layouts may contain parentheses.
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
    """An all-reduce in a compiled module.

    Attributes:
        bytes: The number of bytes that it reduces on each core.
        dtypes: The types of its arrays, without repetition.
        is_gradient: Whether one of its arrays is floating-point and has more than one element.
        in_entry: Whether it runs once per step, outside of loops and branches.
    """

    bytes: int
    dtypes: tuple
    is_gradient: bool
    in_entry: bool


def all_reduces(text):
    """Returns every all-reduce of a compiled module.

    Args:
        text: The module as written by `HloModule.to_string()`.

    Returns:
        List of `AllReduce`.
    """
    reductions = []
    for computation, shape, opcode, _ in _instructions(text):
        if opcode not in _REDUCTIONS:
            continue
        arrays = [(dtype, _elements(sizes)) for dtype, sizes in _ARRAY.findall(shape)]
        reductions.append(
            AllReduce(
                bytes=sum(_width(dtype) * count for dtype, count in arrays),
                dtypes=tuple(sorted({dtype for dtype, _ in arrays})),
                is_gradient=any("f" in dtype and count > 1 for dtype, count in arrays),
                in_entry=computation == "ENTRY",
            )
        )
    return reductions


def host_transfers(text):
    """Returns the instructions that make a module wait for its host, a list of short strings.

    They are infeeds, outfeeds, sends and receives, custom calls into the host, and buffers in the
    host's memory. Sends between cores use other channels and do not count.

    Args:
        text: The module as written by `HloModule.to_string()`.
    """
    transfers = []
    for _, shape, opcode, rest in _instructions(text):
        to_host = opcode in _HOST_OPCODES
        if opcode.startswith(("send", "recv")):
            to_host = "is_host_transfer=true" in rest
        if to_host:
            transfers.append(opcode)
        transfers += [f"custom-call {target}" for target in _HOST_TARGETS.findall(rest)]
        if _HOST_MEMORY.search(shape):
            transfers.append(f"{opcode} in host memory")
    return transfers


def faults(text, cores, parameters):
    """Returns the faults of a compiled training step, a list of sentences.

    Args:
        text: The module as written by `HloModule.to_string()`.
        cores: The number of cores that it was compiled for.
        parameters: The number of trainable parameters. Each has a float32 gradient to reduce.
    """
    gradients = [reduction for reduction in all_reduces(text) if reduction.is_gradient]
    expected = 1 if cores > 1 else 0
    sentences = [f"It waits for the host: {transfer}." for transfer in host_transfers(text)]
    if len(gradients) != expected:
        sentences.append(f"It has {len(gradients)} all-reduces of gradients, not {expected}.")
    if not all(reduction.in_entry for reduction in gradients):
        sentences.append("It reduces gradients inside a loop: more than once per update.")
    if len(gradients) == 1 and gradients[0].bytes < 4 * parameters:
        sentences.append(f"It reduces less than the float32 gradients of {parameters} parameters.")
    return sentences


def _instructions(text):
    """Yields a tuple for each instruction: computation, shape, opcode, and the rest of the line.

    The name of the entry computation is "ENTRY".
    """
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
