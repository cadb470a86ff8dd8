"""A reader of De et al. 2022 asks how much its tables would cost here."""

import pytest
from absl import flags
from cases import nightly

from tfdpx.train import classify


def test_help_lists_what_can_be_asked_for():
    text = flags.FLAGS.module_help(classify)
    for name in ("epsilon", "dataset", "workdir", "resume", "dry_run", "head"):
        assert f"--{name}:" in text or f"--[no]{name}:" in text, name
    assert "--strategy:" not in text and "--strategy:" in str(flags.FLAGS)  # Shown by --helpfull.
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize(
    "preset, wanted",
    [
        # As printed in the paper's appendix; Table 12's epsilon 8 was trained on 45,000 images.
        ("table12/eps8", dict(model="wrn_16_4", batch_size=4096, steps=2468, augmult=16)),
        nightly(
            "table14/eps8", dict(model="nf_resnet_50", batch_size=16384, steps=71589, augmult=4)
        ),
        nightly("table21/last_eps8", dict(model="nf_resnet_50", trainable="last")),
    ],
)
def test_a_table_says_what_it_would_take(run, preset, wanted):
    record, _ = run(classify, preset=preset, dry_run=True)
    assert {name: record[name] for name in wanted} == wanted
    by_rdp, _ = run(classify, preset=preset, dry_run=True, accountant="rdp")
    assert 7.6 < by_rdp["epsilon"] < 8.2 and record["epsilon"] < by_rdp["epsilon"]
    assert record["images_per_update"] == record["batch_size"] * max(record["augmult"], 1)


SLIPS = [
    (dict(preset="table12/esp8"), "Did you mean 'table12/eps8'?"),
    (dict(preset="digits", dataset="cifar01", dry_run=True), "Did you mean 'cifar10'?"),
    (dict(preset="digits", model="wrn-16-4", dry_run=True), "Did you mean 'wrn_16_4'?"),
]


def test_a_slip_of_the_finger_is_understood(refusal):
    for slip, near in SLIPS:
        assert near in refusal(classify, **slip)


def test_a_flag_is_understood_too():
    with pytest.raises(flags.UnrecognizedFlagError, match="Did you mean: epsilon"):
        flags.FLAGS(["classify", "--epsilom=3"])


def test_a_run_that_fails_leaves_nothing_behind(refusal, tmp_path):
    arguments = dict(workdir=tmp_path / "runs" / "first", preset="digits", model="wrn-16-4")
    assert "There is no model" in refusal(classify, **arguments)
    assert list(tmp_path.iterdir()) == []
