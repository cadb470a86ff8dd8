import pytest

from tfdpx.train.config.errors import UserError, did_you_mean
from tfdpx.train.config.run_flags import leaving_no_empty_folder, make_workdir


def fail_in(workdir, write=None):
    with pytest.raises(UserError), leaving_no_empty_folder(workdir):
        make_workdir(str(workdir))
        if write:
            (workdir / write).write_text("kept")
        raise UserError("no")


def test_what_a_failed_run_made_is_removed(tmp_path):
    fail_in(tmp_path / "runs" / "first")
    assert list(tmp_path.iterdir()) == []


def test_what_holds_something_stays(tmp_path):
    fail_in(tmp_path / "runs" / "first", write="curve.jsonl")
    assert (tmp_path / "runs" / "first" / "curve.jsonl").read_text() == "kept"


def test_folders_that_were_there_stay(tmp_path):
    (tmp_path / "mine").mkdir()
    fail_in(tmp_path / "mine")
    fail_in(tmp_path / "mine" / "first")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_run_that_ends_well_keeps_its_folder(tmp_path):
    with leaving_no_empty_folder(tmp_path / "run"):
        make_workdir(str(tmp_path / "run"))
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize(
    "name, end",
    [
        ("cifar01", " Did you mean 'cifar10'?"),
        ("mnist", " Did you mean 'mnist'?"),
        ("imagenet", ""),
        ("", ""),
    ],
)
def test_suggestions(name, end):
    assert did_you_mean(name, ["cifar10", "mnist"]) == end
