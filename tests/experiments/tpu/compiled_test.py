"""The reader of compiled modules reports every reason why a step is unfit for a pod, only those."""

import pytest

from experiments.tpu import compiled

PARAMETERS = 30

ALL_REDUCE = (
    "  %all-reduce.1 = (f32[4,5]{1,0:T(8,128)S(1)}, f32[10]{0:T(128)}, /*index=2*/s32[]) "
    "all-reduce(%a, %b, %c), replica_groups={{0,1,2,3}}, to_apply=%add"
)
COUNTERS = (
    "  %n = s64[4]{0} all-reduce(%m), to_apply=%add",
    "  %n2 = f32[] all-reduce(%x), to_apply=%add",
)
ASYNCHRONOUS = (
    "  %s = f32[30]{0} all-reduce-start(%a), replica_groups={{0,1}}, to_apply=%add",
    "  %d = f32[30]{0} all-reduce-done(%s)",
)


def module(*entry, loop=()):
    return "\n".join(
        [
            "HloModule step, is_scheduled=true",
            "",
            "%body (p: (s32[], f32[30])) -> (s32[], f32[30]) {",
            "  %p = (s32[], f32[30]{0}) parameter(0)",
            *loop,
            "}",
            "",
            "ENTRY %step.1 (x: f32[8]) -> f32[8] {",
            "  %x = f32[8]{0} parameter(0)",
            *entry,
            "  ROOT %copy.1 = f32[8]{0:T(128)S(1)} copy(%x)",
            "}",
        ]
    )


@pytest.mark.parametrize(
    ("entry", "loop", "cores", "fault"),
    [
        ((ALL_REDUCE,), (), 4, None),
        ((ALL_REDUCE, *COUNTERS), (), 4, None),  # Counters are not gradients.
        (ASYNCHRONOUS, (), 4, None),  # An asynchronous pair counts once.
        ((), (), 1, None),  # One core has nothing to reduce.
        ((ALL_REDUCE,), (), 1, "1 all-reduce"),
        ((), (), 4, "0 all-reduces"),
        ((ALL_REDUCE, ALL_REDUCE), (), 4, "2 all-reduces"),
        ((), (ALL_REDUCE,), 4, "inside a loop"),
        ((ALL_REDUCE.replace("4,5", "4"),), (), 4, "less than"),
        ((ALL_REDUCE.replace("f32[", "bf16["),), (), 4, "less than the float32 gradients"),
    ],
)
def test_one_all_reduce_of_all_gradients_outside_of_loops(entry, loop, cores, fault):
    faults = compiled.faults(module(*entry, loop=loop), cores=cores, parameters=PARAMETERS)
    assert len(faults) == (fault is not None) and (not faults or fault in faults[0])
    if (ALL_REDUCE,) == entry:
        [reduction] = compiled.all_reduces(module(*entry))
        assert reduction.bytes == 4 * (20 + 10 + 1) and reduction.dtypes == ("f32", "s32")


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("  %i = ((f32[8]{0}), token[]) infeed(%token)", True),
        ("  %o = token[] outfeed(%x, %token)", True),
        ("  %s = (f32[8]{0}, token[]) send(%x, %t), channel_id=1, is_host_transfer=true", True),
        ("  %r = (f32[8]{0}, token[]) recv(%t), channel_id=1, is_host_transfer=true", True),
        ('  %c = f32[8]{0} custom-call(%x), custom_call_target="xla_python_cpu_callback"', True),
        ('  %c = f32[8]{0} custom-call(%x), custom_call_target="MoveToHost"', True),
        ("  %h = f32[8]{0:T(128)S(5)} copy(%x)", True),
        ('  %c = s64[] custom-call(%x, %y), custom_call_target="X64Combine"', False),
        ("  %s = (f32[8]{0}, u32[], token[]) send(%x, %token), channel_id=1", False),
        ("  %k = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%x)", False),
    ],
)
def test_waits_for_the_host_are_found(line, waits):
    transfers = compiled.host_transfers(module(line))
    faults = compiled.faults(module(line), cores=1, parameters=PARAMETERS)
    assert len(transfers) == len(faults) == waits
    assert all(transfer in fault for transfer, fault in zip(transfers, faults, strict=True))
