"""Presets: the settings of the papers, what they spend, the size of their models, and an update."""

import csv
import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import pytest
import rdp_precision
from cases import nightly, slow

from tfdpx import noise
from tfdpx.accounting import accountants
from tfdpx.accounting.gaussian import added_delta
from tfdpx.train import defaults, dry_run, fitting, presets, settings
from tfdpx.train.data import tfds
from tfdpx.train.errors import UserError

# Tables 12 to 21, with the number of images and the epsilon that an RDP accountant gives for them.
with (pathlib.Path(__file__).parent / "paper_hyperparameters.csv").open() as file:
    ROWS = list(csv.DictReader(file))
DATASETS = {"imagenet": "imagenet2012", "places365": "places365_small"}
CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000, "places365": 365}
MILLIONS = {
    "wrn_16_4": 2.75,
    "wrn_40_4": 8.95,
    "wrn_28_10": 36.5,
    "nf_resnet_50": 25.6,
    "nf_resnet_200": 64.7,
}


def resolve(preset, **given):
    return settings.resolve(preset, given)


def describe(preset, seconds_per_update=None, **given):
    return dry_run.describe(resolve(preset, **given), seconds_per_update)


def preset_of(row):
    column = f"eps{row['epsilon']}"
    if row["table"] == "21":
        column = f"{row['trainable']}_{column}".replace("epsinf", "inf")
    return f"table{row['table']}/{column}"


def size_of(row):
    """Height and width of the images of a column."""
    return {"14": 224, "20": 320, "21": 256}.get(row["table"], 32)


def in_ci(rows, *names):
    """Returns all cases; those that are not named run in `make nightly`."""
    return [row if row in names else nightly(row) for row in rows]


def test_the_45_columns_of_the_paper_are_set_as_it_prints_them():
    assert len({preset_of(row) for row in ROWS}) == 45
    for row in ROWS:
        preset, private = preset_of(row), row["epsilon"] != "inf"
        values, small = resolve(preset), size_of(row) == 32
        wanted = dict(
            model=row["model"],
            trainable=row["trainable"],
            pretrained_on=row["pretrain"] or None,
            augmult=int(row["augmult"]),
            batch_size=int(row["batch_size"]),
            l2_norm_clip=float(row["clip"]),
            learning_rate=float(row["learning_rate"]),
            noise_multiplier=float(row["sigma"]),
            steps=int(row["updates"]),
            private=private,
            optimizer=None,
            momentum=0.0,
            label_smoothing=0.1 if row["table"] == "21" else 0.0,
            ema_momentum=0.9999 if small else 0.99999,
            eval_split="test" if values.validation else None,
            center_crop=not small,
        )
        if values.augmult:
            wanted |= dict(
                augment_flip=True,
                augment_padding=4 if small else 0,
                augment_resize=1.0 if small else 1.2,
            )
        assert {name: getattr(values, name) for name in wanted} == wanted, preset
        if private:
            assert values.delta == float(row["delta"]), preset
        entry = tfds.find(values.dataset)
        assert entry is tfds.find(DATASETS.get(row["task"], row["task"])), preset
        assert (values.image_size or entry.image_shape[0]) == size_of(row), preset


# Updates, examples of an update, noise where it is published, and epsilon by RDP and by PLD where
# the noise was not solved for.
OTHERS = {
    "table9/eps1": (250, 16384, 21.1, (1.00, 0.91)),
    "scatternet/mnist": (560, 4096, None, None),
    "scatternet/fashion_mnist": (280, 8192, None, None),
    "scatternet/cifar10": (360, 8192, None, None),
    "scatternet/cifar10_linear": (360, 8192, None, None),
    "tan/eps8": (2500, 4096, 3.0, (7.10, 6.58)),
    "randp/eps1": (875, 4096, 9.3, (1.07, 0.98)),
    "dp_mix/eps8": (2500, 4096, None, None),
    "individual/cifar10": (2600, 4000, 3.2, (6.52, 6.04)),
    "individual/mnist": (1500, 4000, 6.0, (1.86, 1.71)),
}


@pytest.mark.parametrize(
    "preset", in_ci(OTHERS, "tan/eps8", "individual/cifar10", "individual/mnist", "table9/eps1")
)
def test_presets_of_other_papers_spend_their_epsilon(preset):
    def plan(**given):
        values = resolve(preset, **given)
        return values.privacy_plan(tfds.find(values.dataset).train_images)

    steps, batch_size, noise_multiplier, epsilons = OTHERS[preset]
    mine = plan()
    assert (mine.steps, mine.batch_size, mine.delta) == (steps, batch_size, 1e-5)
    if epsilons is None:
        assert 0.999 * resolve(preset).epsilon < mine.epsilon <= resolve(preset).epsilon
        return
    assert mine.noise_multiplier == noise_multiplier
    spent = plan(accountant="rdp").epsilon, mine.epsilon
    assert [round(epsilon, 2) for epsilon in spent] == list(epsilons)


def test_networks_and_views_of_other_papers():
    tan, randp, mix = map(resolve, ("tan/eps8", "randp/eps1", "dp_mix/eps8"))
    for values in (tan, randp, mix):
        assert (values.model, values.relu_first) == ("wrn_16_4", True)
        assert not values.weight_standardization
    assert (randp.pretrained_on, randp.trainable) == ("synthetic", "all")
    assert type(fitting.views(tan)).__name__ == "RandomCropFlip"
    views = fitting.views(mix)
    assert (views.mixed_views, mix.augmult - views.mixed_views, views.alpha) == (18, 16, 0.2)
    assert views.augment.get_config() == fitting.views(tan).get_config()
    for name in ("cifar10", "mnist", "utkface_gender", "utkface_age"):
        values = resolve(f"individual/{name}")
        assert values.individual and values.individual_refreshes == 2
    assert (values.batch_size, values.noise_multiplier, values.steps) == (200, 1.5, 100 * 75)
    assert describe("individual/cifar10")["parameters"] == 269_722
    last, whole = resolve("figure4/last_50"), resolve("figure4/all_200")
    assert (last.trainable, whole.trainable, whole.model) == ("last", "all", "nf_resnet_200")
    assert (last.batch_size, last.noise_multiplier, last.delta) == (1024, 0.6, 8e-7)


@pytest.mark.parametrize("row", in_ci(ROWS, *ROWS[::15]), ids=preset_of)
def test_each_column_says_what_the_paper_says(row):
    report = describe(preset_of(row))
    views = max(int(row["augmult"]), 1)
    assert report["images_per_update"] == int(row["batch_size"]) * views
    assert report["num_examples"] == int(row["num_examples"])
    paper = float(row["epsilon_rdp"])
    assert paper * (1 - 1e-4) <= report["epsilon_rdp"]
    assert report["epsilon_rdp"] <= paper * (1 + 1e-4 + rdp_precision.EXCESS)
    if row["epsilon"] != "inf":  # The tighter accountant, by 6 to 10% in every column.
        assert 0.9 < report["epsilon_pld"] / report["epsilon_rdp"] < 0.95
    assert report["accountant"] == "pld" and report["epsilon"] == report["epsilon_pld"]


@pytest.mark.parametrize("table", in_ci(["table15", "table16", "table17", "table18"], "table15"))
def test_epsilon_is_by_the_accountant_of_the_run(table):
    report, papers = describe(f"{table}/eps4"), describe(f"{table}/eps4", accountant="rdp")
    assert report["epsilon"] == pytest.approx(3.714, abs=5e-4)
    assert papers["epsilon"] == papers["epsilon_rdp"] == pytest.approx(4.020, abs=5e-4)
    assert (report["accountant"], papers["accountant"]) == ("pld", "rdp")


# The first column of each network and number of classes; `make nightly` takes all columns.
FIRST = {(row["model"], row["task"]): row for row in reversed(ROWS)}.values()


@pytest.mark.parametrize(
    "row",
    [row if row is ROWS[0] else slow(row) if row in FIRST else nightly(row) for row in ROWS],
    ids=preset_of,
)
def test_models_and_images_are_those_of_appendix_c(row):
    report = describe(preset_of(row))
    published = MILLIONS[row["model"]]
    if row["model"] == "nf_resnet_50":  # Published with the 1000 classes of ImageNet.
        published -= 2.049e-3 * (1000 - CLASSES[row["task"]])
    assert report["parameters"] / 1e6 == pytest.approx(published, rel=0.005)
    assert (report["image_height"], report["image_width"]) == (size_of(row), size_of(row))


ABLATION = ["baseline", "group_norm", "large_batch", "weight_standardization", "augmult", "ema"]


@pytest.mark.parametrize("row", in_ci(ABLATION, "baseline"))
def test_the_ablation_spends_epsilon_8_by_the_accountant_of_the_paper(row):
    report = describe(f"table2/{row}")
    assert 7.999 < report["epsilon_rdp"] <= 8.0
    assert (report["num_examples"], report["model"]) == (45_000, "wrn_40_4")
    assert report["batch_size"] == (256 if row in ("baseline", "group_norm") else 4096)


def test_each_row_of_the_ablation_adds_what_its_name_says():
    rows = [vars(resolve(f"table2/{row}")) for row in ABLATION]
    changes = [
        {name for name in before if before[name] != after[name]}
        for before, after in zip(rows, rows[1:], strict=False)
    ]
    assert changes == [
        {"group_norm"},
        {"batch_size", "steps", "learning_rate", "report_every"},
        {"weight_standardization"},
        {"augmult", "augment_padding", "augment_flip", "microbatch_size"},
        {"ema_momentum"},
    ]
    assert (rows[4]["augmult"], rows[5]["ema_momentum"]) == (16, 0.9999)


ERRORS = [
    (dict(dataset="mnits"), "'mnits' is not known.*--dry_run knows: .*cifar10"),
    (dict(dataset="imagenet2012"), "of many sizes: give --image_size"),
    (dict(augmult=2, augment_padding=8), "--augment_padding=8"),
    (dict(batch_size=5000), "Argument `batch_size`.*num_examples"),
    (dict(model="wrn_17_4"), "Argument `depth`"),
]


def test_dry_runs_without_a_table_and_their_errors():
    given = dict(dataset="mnist", steps=1, batch_size=9, accountant="rdp")
    assert describe("digits", model="lenet", **given)["parameters"] == 61_706
    report = describe("digits", noise_multiplier=1e5, batch_size=1, steps=1)
    assert report["epsilon_rdp"] is None and 0 <= report["epsilon_pld"] < 1e-3
    # On all 50,000 images this column would spend another epsilon.
    final = describe("table12/eps8", validation=0.0)
    assert final["num_examples"] == 50_000
    assert final["epsilon_rdp"] < 0.95 * describe("table12/eps8")["epsilon_rdp"]
    for given, message in ERRORS:
        with pytest.raises(UserError, match=message):
            describe("digits", **given)


# At least as many as the model has.
MILLIONS_AT_MOST = {
    **{name: 1.1 * millions for name, millions in MILLIONS.items()},
    **dict.fromkeys(("small_cnn", "scatter_linear", "scatter_cnn", "resnet_20"), 1),
    **{"nf_resnet_101": 46, "nf_resnet_152": 62, None: 26},
}
IMAGES_OF_A_FOLDER = 200


def share_of_delta(preset, largest_radius):
    """The part of delta that the tail of the noise takes."""
    values = resolve(preset)
    # A part of a data set, such as some of its classes, is noisier than the whole. Nobody knows
    # how many images a folder has.
    whole = tfds.Name.parse(values.dataset).entry.train_images or IMAGES_OF_A_FOLDER
    values, _ = defaults.complete(values, whole)
    noise_multiplier = values.noise_multiplier
    if noise_multiplier is None:
        faster = dataclasses.replace(values, accountant="rdp")
        noise_multiplier = faster.privacy_plan(whole).noise_multiplier
    steps = values.steps or values.privacy_plan(whole).steps
    # Of the part, its share is the larger.
    sampling_probability = min(1.0, values.batch_size / (whole / 3))
    parameters = 1e6 * MILLIONS_AT_MOST[values.model]
    run = (noise_multiplier, sampling_probability, parameters, steps)
    normalisation = parameters / 2 * steps * math.exp(-(largest_radius**2) / 2)
    return added_delta(*run, largest_radius) / values.delta + normalisation


@pytest.mark.parametrize(
    "names", [("digits", "folder", "table14/eps8"), nightly(None)], ids=["some", "all"]
)
def test_the_tail_takes_less_of_delta_than_is_kept_back_for_it(names):
    for preset in filter(lambda name: resolve(name).private, names or presets.names()):
        share = share_of_delta(preset, noise.LARGEST_RADIUS)
        assert 0 < share < accountants.RESERVED_SHARE / 2 < 1e-3, preset


@pytest.mark.planted("noise of 32 random bits")
def test_32_bits_would_take_all_of_delta():
    radius_of_32_bits = math.sqrt(2 * 33 * math.log(2))
    assert share_of_delta("table12/eps8", radius_of_32_bits) > 1
    assert share_of_delta("table14/eps8", radius_of_32_bits) > 100


# The presets whose models, images, views or trained layers differ, and MiB that suffice.
LIMITS = {
    "table2/baseline": 1_500,
    "table2/ema": 2_500,
    "table12/eps8": 1_500,
    "table13/eps8": 3_500,
    "table14/eps8": 6_000,
    "table15/eps8": 5_000,
    "table16/eps8": 3_500,
    "table17/eps8": 5_000,
    "table18/eps8": 3_500,
    "table20/eps8": 8_000,
    "table21/all_eps8": 6_000,
    "table21/last_eps8": 4_000,
    "tan/eps8": 1_500,
    "dp_mix/eps8": 2_000,
}
SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "preset_update.py"


@pytest.mark.parametrize("preset", in_ci(LIMITS, "table12/eps8"))  # Of the quickest model.
@pytest.mark.slow
def test_one_update_of_the_model_at_full_image_size(preset):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), preset], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["finite"] and report["changed"], report
    assert report["peak_mib"] < LIMITS[preset], report
    is_last = report["trainable"] == "last"
    share = report["trained_parameters"] / report["parameters"]
    assert share < 0.1 if is_last else share == 1
