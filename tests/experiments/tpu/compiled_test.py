"""The reader of compiled modules must see what would make a step unfit for a pod, and only that."""

import pytest

from experiments.tpu import compiled

PARAMETERS = 30

ALL_REDUCE = (
    "  %all-reduce.1 = (f32[4,5]{1,0:T(8,128)S(1)}, f32[10]{0:T(128)}, /*index=2*/s32[]) "
    "all-reduce(%a, %b, %c), replica_groups={{0,1,2,3}}, to_apply=%add"
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


def test_one_all_reduce_of_all_gradients_on_four_cores():
    text = module(ALL_REDUCE)
    (reduction,) = compiled.all_reduces(text)
    assert reduction.bytes == 4 * (20 + 10 + 1)
    assert reduction.dtypes == ("f32", "s32")
    assert reduction.is_gradient and reduction.in_entry
    assert compiled.faults(text, cores=4, parameters=PARAMETERS) == []


def test_asynchronous_all_reduces_count_once():
    text = module(
        "  %s = f32[30]{0} all-reduce-start(%a), replica_groups={{0,1}}, to_apply=%add",
        "  %d = f32[30]{0} all-reduce-done(%s)",
    )
    assert len(compiled.all_reduces(text)) == 1


def test_counters_are_no_gradients():
    text = module(ALL_REDUCE, "  %n = s64[4]{0} all-reduce(%m), to_apply=%add")
    text = text.replace("ROOT", "%n2 = f32[] all-reduce(%x), to_apply=%add\n  ROOT")
    assert [r.is_gradient for r in compiled.all_reduces(text)] == [True, False, False]
    assert compiled.faults(text, cores=4, parameters=PARAMETERS) == []


def test_bfloat16_gradients_are_less_than_was_asked_for():
    text = module(ALL_REDUCE.replace("f32[", "bf16["))
    (reduction,) = compiled.all_reduces(text)
    assert reduction.is_gradient and reduction.bytes == 2 * 30 + 4
    (fault,) = compiled.faults(text, cores=4, parameters=PARAMETERS)
    assert "less than the float32 gradients" in fault


@pytest.mark.parametrize(
    ("entry", "loop", "what"),
    [
        ((), (), "0 all-reduces"),
        ((ALL_REDUCE, ALL_REDUCE), (), "2 all-reduces"),
        ((), (ALL_REDUCE,), "inside a loop"),
        ((ALL_REDUCE.replace("4,5", "4"),), (), "less than"),
    ],
)
def test_a_step_that_reduces_otherwise_has_a_fault(entry, loop, what):
    faults = compiled.faults(module(*entry, loop=loop), cores=4, parameters=PARAMETERS)
    assert len(faults) == 1 and what in faults[0]


def test_one_core_has_nothing_to_reduce():
    assert compiled.faults(module(), cores=1, parameters=PARAMETERS) == []
    assert compiled.faults(module(ALL_REDUCE), cores=1, parameters=PARAMETERS)


@pytest.mark.parametrize(
    "line",
    [
        "  %i = ((f32[8]{0}), token[]) infeed(%token)",
        "  %o = token[] outfeed(%x, %token)",
        "  %s = (f32[8]{0}, u32[], token[]) send(%x, %token), channel_id=1, is_host_transfer=true",
        "  %r = (f32[8]{0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true",
        '  %c = f32[8]{0} custom-call(%x), custom_call_target="xla_python_cpu_callback"',
        '  %c = f32[8]{0} custom-call(%x), custom_call_target="MoveToHost"',
        "  %h = f32[8]{0:T(128)S(5)} copy(%x)",
    ],
)
def test_what_waits_for_the_host_is_found(line):
    (found,) = compiled.host_transfers(module(line))
    (fault,) = compiled.faults(module(line), cores=1, parameters=PARAMETERS)
    assert found in fault


@pytest.mark.parametrize(
    "line",
    [
        '  %c = s64[] custom-call(%x, %y), custom_call_target="X64Combine"',
        "  %s = (f32[8]{0}, u32[], token[]) send(%x, %token), channel_id=1",
        "  %k = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%x)",
    ],
)
def test_what_stays_on_the_cores_is_not(line):
    assert compiled.host_transfers(module(line)) == []
