"""A folder of several people: the person of each image, the people to test on, one private run."""

import collections
import json
import re

import numpy as np
import pytest
from PIL import Image

from tfdpx.train import classify, settings
from tfdpx.train.data import images
from tfdpx.train.errors import UserError

PEOPLE = 12


def write(folder, name="{person}/{i}.png", people=range(PEOPLE)):
    """Writes two classes; every person has images in both, some more than others."""
    for label, value in (("dark", 40), ("light", 200)):
        for person in people:
            for i in range(1 + person % 5):
                path = folder / label / name.format(person=f"p{person}", i=i)
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (12, 12), value + person).save(path)
    return folder


def load(folder, user="parent_folder", **options):
    return images.load(f"folder:{folder}", user=user, **options)


@pytest.mark.parametrize(
    "user, name",
    [
        ("parent_folder", "{person}/{i}.png"),
        (r"/(p\d+)_", "{person}_{i}.png"),
        (r"p\d+", "scan {i} of {person}.png"),
    ],
)
def test_no_person_is_trained_and_tested_on(tmp_path, user, name):
    data = load(write(tmp_path, name), user, test_fraction=0.3)
    of_person = data.train_x[:, 0, 0, 0] % 20  # Shades are 40 or 200, plus the person.
    assert len(data.train_users) == data.num_train == len(of_person)
    for person in set(data.train_users):
        assert len(set(of_person[data.train_users == person])) == 1
    assert data.num_protected == len(set(data.train_users)) == len(set(of_person)) < PEOPLE
    assert not set(of_person) & set(data.eval_x[:, 0, 0, 0] % 20)
    most = max(collections.Counter(data.train_users).values())
    note = f"--user={user}: {data.num_protected}, with at most {most} images each, for example 'p"
    assert any(note in n for n in data.notes)


def test_a_pattern_that_finds_one_person_in_all_images_is_refused(tmp_path):
    with pytest.raises(UserError, match="must tell people apart.*--user=an, .*one person"):
        load(write(tmp_path, "scan {i} of {person}.png"), "an")


def test_a_folder_of_test_images_need_not_name_people(tmp_path):
    write(tmp_path / "train")
    write(tmp_path / "test", "{person}_{i}.png")
    data = load(tmp_path)
    assert data.num_protected == PEOPLE
    assert data.num_train == data.num_eval == len(data.train_users)


def test_one_person_less_moves_no_other(tmp_path):
    whole = set(load(write(tmp_path / "whole"), test_fraction=0.5).train_users)
    for left_out in range(PEOPLE):
        people = [person for person in range(PEOPLE) if person != left_out]
        part = load(write(tmp_path / f"{left_out}", people=people), test_fraction=0.5)
        assert whole - {b"p%d" % left_out} == set(part.train_users)


def test_a_person_of_two_spellings_is_one_person(tmp_path):
    for person in range(PEOPLE):
        for label, name in (("dark", f"\u00e9{person}"), ("light", f"e\u200d\u0301{person}")):
            path = tmp_path / label / name / "0.png"
            path.parent.mkdir(parents=True)
            Image.new("L", (12, 12), 9).save(path)
    data = load(tmp_path, test_fraction=0.5)
    assert 0 < data.num_protected < PEOPLE and data.num_train == 2 * data.num_protected


NOBODY = [
    ("parent_folder", "{person}_{i}.png", "as CLASS/PERSON/NAME, and 6 of 6 paths"),
    ("parent_folder", "{person}/session 1/{i}.png", "as CLASS/PERSON/NAME, and 6 of 6 paths"),
    ("owner-(.+)-", "{person}_{i}.png", "6 of 6 paths do not match it: dark/p0_0.png, dark/p1_0"),
    ("(", "{person}_{i}.png", "regular expression with.*unterminated"),
    ("(p)([0-9]+)", "{person}_{i}.png", "at most one group"),
    ("parent_folder", "none/{person}_{i}.png", "the id b'none'"),
]


def test_names_in_two_cases_are_refused(tmp_path):
    write(tmp_path, people=range(6))
    (tmp_path / "dark" / "p3").rename(tmp_path / "dark" / "P3")
    with pytest.raises(UserError, match="spell the id of a person in one way.*lower case"):
        load(tmp_path, test_fraction=0.0)


@pytest.mark.parametrize(
    "name, user",
    [
        ("{person}/{i}.png", "parent_folder"),
        ("{person}_{i}.png", r"'([^-_. /]+)[-_. ][^/]*\.[^./]*\Z'"),
        ("scan of {person} {i}.png", r"'([^/]+)[-_. ][^-_. /]*\.[^./]*\Z'"),
        ("{i}{person}.png", None),
    ],
)
def test_several_images_of_a_person_are_asked_about(tmp_path, name, user):
    """The names of files raise the question, and the suggested command protects people."""
    write(tmp_path, name)
    if not user:
        load(tmp_path, None)
    else:
        with pytest.raises(UserError, match=re.escape(f"to protect people, add --user={user}, ")):
            load(tmp_path, None)
        protected = load(tmp_path, user.strip("'"), test_fraction=0.5)
        assert 0 < protected.num_protected < PEOPLE < protected.num_train
        assert load(tmp_path, "none").train_users is None


def test_a_run_stops_before_it_trains_if_several_images_seem_to_be_of_one_person(tmp_path, refusal):
    dataset = f"folder:{write(tmp_path / 'images')}"
    line = refusal(classify, dataset=dataset, epsilon=8.0, workdir=tmp_path / "run")
    assert "add --user=parent_folder, but not with --head" in line
    assert "If every person has one image, add --user=none." in line
    assert not (tmp_path / "run").exists()
    assert settings.resolve(None, dict(dataset=dataset, user="none")).has_people is False
    head = dict(dataset=dataset, head="least_squares", epsilon=8.0, init_from=tmp_path)
    with pytest.raises(UserError, match="single images: leave out --head .*--trainable=last.*, or"):
        settings.resolve(None, {**head, "user": "parent_folder"})
    with pytest.raises(UserError, match="not with --head, .* If every .* add --user=none"):
        images.load_for(settings.resolve(None, head), None, False)


def test_images_of_nobody_are_refused(tmp_path):
    for number, (user, name, message) in enumerate(NOBODY):
        with pytest.raises(UserError, match=message):
            load(write(tmp_path / f"{number}", name, people=range(2)), user, test_fraction=0.0)


@pytest.mark.slow
def test_classify_protects_people(tmp_path, run):
    arguments = dict(
        dataset=f"folder:{write(tmp_path / 'images')}", user="parent_folder", epsilon=8.0,
        delta=1e-3, model="small_cnn", steps=6, batch_size=6, accountant="rdp",
    )  # fmt: skip
    report, _ = run(classify, workdir=tmp_path / "run", **arguments)
    assert report["neighbours"] == "add_or_remove_user" and 7.9 < report["epsilon"] <= 8
    assert report["num_examples"] < PEOPLE and np.isfinite(report["test_accuracy"])
    text = " ".join((tmp_path / "run" / "privacy_statement.txt").read_text().split())
    assert "all images of one person" in text and "people" in text
    [entry] = json.loads((tmp_path / "run" / "record.json").read_text())["ledger"]["entries"]
    assert entry["unit"] == "user"
