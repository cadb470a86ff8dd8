"""A folder of several people: whose each image is, who is tested on, and one private run."""

import json

import numpy as np
import pytest
from PIL import Image

from tfdpx.train import classify
from tfdpx.train.data import loading
from tfdpx.train.data.people import People
from tfdpx.train.errors import UserError

PEOPLE = 12


def write(folder, name=lambda person, i: f"{person}/{i}.png", count=5, people=range(PEOPLE)):
    """Two classes; every person has images in both, some more than others."""
    for label, value in (("dark", 40), ("light", 200)):
        for person in people:
            for i in range(1 + person % count):
                path = folder / label / name(f"p{person}", i)
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (12, 12), value + person).save(path)
    return folder


@pytest.mark.parametrize(
    "user, name",
    [
        ("parent_folder", lambda person, i: f"{person}/{i}.png"),
        (r"/(p\d+)_", lambda person, i: f"{person}_{i}.png"),
        (r"p\d+", lambda person, i: f"scan {i} of {person}.png"),
    ],
)
def test_no_person_is_trained_and_tested_on(tmp_path, user, name):
    data = loading.load(f"folder:{write(tmp_path, name)}", user=user, test_fraction=0.3)
    of_person = data.train_x[:, 0, 0, 0] % 20  # The shades: 40 or 200, and the person.
    assert len(data.train_users) == data.num_train == len(of_person)
    for person in set(data.train_users):
        assert len(set(of_person[data.train_users == person])) == 1
    assert data.num_protected == len(set(data.train_users)) == len(set(of_person))
    assert not set(of_person) & set(data.eval_x[:, 0, 0, 0] % 20)
    assert 0.1 < data.num_eval / (data.num_eval + data.num_train) < 0.5
    assert f"People to train on, by --user={user}: {data.num_protected}." in data.notes


def test_one_person_less_moves_no_other(tmp_path):
    whole = write(tmp_path / "whole")
    part = write(tmp_path / "part", people=range(1, PEOPLE))
    both = [loading.load(f"folder:{each}", user="parent_folder") for each in (whole, part)]
    trained, others = (set(data.train_users) for data in both)
    assert trained - {b"p0"} == others


def test_a_class_with_nobody_to_train_on_is_refused(tmp_path):
    path = write(tmp_path) / "rare" / "p3" / "0.png"
    path.parent.mkdir(parents=True)
    Image.new("L", (12, 12), 250).save(path)
    with pytest.raises(UserError, match="class rare tested on. Give another"):
        for seed in range(9):
            loading.load(f"folder:{tmp_path}", user="parent_folder", test_seed=seed)


def test_a_person_of_two_spellings_is_refused_and_never_parted(tmp_path):
    for person in range(PEOPLE):
        for label, name in (("dark", f"\u00e9{person}"), ("light", f"e\u0301{person}")):
            path = tmp_path / label / name / "0.png"
            path.parent.mkdir(parents=True)
            Image.new("L", (12, 12), 9).save(path)
    people = People("parent_folder", tmp_path, classes=1)
    found = {label: sorted((tmp_path / label).rglob("*.png")) for label in ("dark", "light")}
    tested = people.part(found, 0.5, 0)["test"]
    assert 0 < len(tested["dark"]) == len(tested["light"])
    with pytest.raises(UserError, match="in one way"):
        loading.load(f"folder:{tmp_path}", user="parent_folder")


NOBODY = [
    ("parent_folder", "not CLASS/PERSON/NAME"),
    ("owner-(.+)-", "does not match"),
    ("(", "regular"),
    ("(p)([0-9]+)", "one group at most"),
]


def test_images_of_nobody_are_refused(tmp_path):
    write(tmp_path / "a", lambda person, i: f"{person}_{i}.png", people=range(2))
    for user, message in NOBODY:
        with pytest.raises(UserError, match=message):
            loading.load(f"folder:{tmp_path / 'a'}", user=user)
    # Of all, "session 1".
    write(tmp_path / "b", lambda person, i: f"{person}/session 1/{i}.png", people=range(2))
    with pytest.raises(UserError, match="not CLASS/PERSON/NAME"):
        loading.load(f"folder:{tmp_path / 'b'}", user="parent_folder")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["scatter_linear", "small_cnn"])
def test_classify_protects_people(tmp_path, run, model):
    given = dict(
        dataset=f"folder:{write(tmp_path / 'images')}", user="parent_folder", epsilon=8.0,
        delta=1e-3, model=model, steps=6, batch_size=6, accountant="rdp",
    )  # fmt: skip
    found, _ = run(classify, workdir=tmp_path / "run", **given)
    assert found["neighbours"] == "add_or_remove_user" and 7.9 < found["epsilon"] <= 8
    assert found["num_examples"] < PEOPLE and np.isfinite(found["test_accuracy"])
    text = " ".join((tmp_path / "run" / "privacy_statement.txt").read_text().split())
    assert "all images of one person" in text and "people" in text
    [entry] = json.loads((tmp_path / "run" / "record.json").read_text())["ledger"]["entries"]
    assert entry["unit"] == "user"
