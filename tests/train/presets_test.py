"""Presets: the papers' settings, their privacy loss, the size of their models, and an update."""

import csv
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
from tfdpx.train import defaults, objects, presets, run, settings
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


def resolve(preset, **arguments):
    return settings.resolve(preset, arguments)


def describe(preset, **arguments):
    return run.describe(resolve(preset, **arguments))


def preset_of(row):
    column = f"eps{row['epsilon']}"
    if row["table"] == "21":
        column = f"{row['trainable']}_{column}".replace("epsinf", "inf")
    return f"table{row['table']}/{column}"


def size_of(row):
    """Returns the height and width of a column's images."""
    return {"14": 224, "20": 320, "21": 256}.get(row["table"], 32)


def in_ci(rows, *names):
    """Returns all cases, of which those not named run in `make nightly`."""
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
            optimizer="dpsgd",
            schedule=None,
            label_smoothing=0.1 if row["table"] == "21" else 0.0,
            ema_momentum=0.9999 if small else 0.99999,
            eval_split="test" if values.validation else None,
            center_crop=None if small else size_of(row),
        )
        if values.augmult:
            large = "ResizeCropFlip:scale=1.2,flip=true"
            wanted["augment"] = "RandomCropFlip:padding=4,flip=true" if small else large
        assert {name: getattr(values, name) for name in wanted} == wanted, preset
        if private:
            assert values.delta == float(row["delta"]), preset
        entry = tfds.find(values.dataset)
        assert entry is tfds.find(DATASETS.get(row["task"], row["task"])), preset
        assert (values.center_crop or entry.image_shape[0]) == size_of(row), preset


# Updates, examples of an update, published noise, and epsilon by RDP and by PLD unless the noise
# was solved for.
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
    def plan(**arguments):
        values = resolve(preset, **arguments)
        return values.privacy_plan(tfds.find(values.dataset).train_images)

    steps, batch_size, noise_multiplier, epsilons = OTHERS[preset]
    default_plan = plan()
    assert (default_plan.steps, default_plan.batch_size, default_plan.delta) == (
        steps,
        batch_size,
        1e-5,
    )
    if epsilons is None:
        assert 0.999 * resolve(preset).epsilon < default_plan.epsilon <= resolve(preset).epsilon
        return
    assert default_plan.noise_multiplier == noise_multiplier
    spent = plan(accountant="rdp").epsilon, default_plan.epsilon
    assert [round(epsilon, 2) for epsilon in spent] == list(epsilons)


SET = {
    "table2/baseline": dict(
        model="wrn_40_4:groups=none,weight_standardization=false",
        batch_size=256,
        epsilon=8.0,
        augmult=0,
        ema_momentum=0.0,
    ),
    "table2/ema": dict(
        model="wrn_40_4",
        batch_size=4096,
        epsilon=8.0,
        augmult=16,
        ema_momentum=0.9999,
    ),
    **dict.fromkeys(
        ("tan/eps8", "randp/eps1", "dp_mix/eps8"),
        dict(model="wrn_16_4:norm_before_relu=false,weight_standardization=false", trainable="all"),
    ),
    "individual/utkface_age": dict(
        individual=True, individual_refreshes=2, batch_size=200, noise_multiplier=1.5, steps=7500
    ),
    "figure4/last_50": dict(
        trainable="last", model="nf_resnet_50", batch_size=1024, noise_multiplier=0.6, delta=8e-7
    ),
    "figure4/all_200": dict(trainable="all", model="nf_resnet_200", center_crop=320),
}


def test_networks_and_views_of_other_papers():
    for preset, wanted in SET.items():
        values = vars(resolve(preset))
        assert {name: values[name] for name in wanted} == wanted, preset
    figure4 = resolve("figure4/all_50").privacy_plan(1_271_167)
    assert figure4.steps == 169_002 and round(figure4.epochs) == 136
    assert resolve("randp/eps1").pretrained_on == "synthetic"
    assert describe("individual/cifar10")["parameters"] == 269_722
    mix = resolve("dp_mix/eps8")
    shape, crops = (32, 32, 3), resolve("tan/eps8")
    views, crops = (objects.AUGMENTATIONS.make(one.augment, shape) for one in (mix, crops))
    assert (views.mixed_views, mix.augmult - views.mixed_views, views.alpha) == (18, 16, 0.2)
    assert type(crops).__name__ == "RandomCropFlip"
    assert views.augment.get_config() == crops.get_config()


# The first column of each network and number of classes; `make nightly` takes all columns.
FIRST = {(row["model"], row["task"]): row for row in reversed(ROWS)}.values()


@pytest.mark.parametrize(
    "row",
    [row if row is ROWS[0] else slow(row) if row in FIRST else nightly(row) for row in ROWS],
    ids=preset_of,
)
def test_each_column_says_what_the_paper_says_of_epsilon_model_and_images(row):
    report = describe(preset_of(row))
    by_rdp = describe(preset_of(row), accountant="rdp")["epsilon"]
    views = max(int(row["augmult"]), 1)
    assert report["images_per_update"] == int(row["batch_size"]) * views
    assert report["num_examples"] == int(row["num_examples"])
    paper = float(row["epsilon_rdp"])
    assert paper * (1 - 1e-4) <= by_rdp <= paper * (1 + 1e-4 + rdp_precision.EXCESS)
    if row["epsilon"] != "inf":  # The tighter accountant, by 6 to 10% in every column.
        assert 0.9 < report["epsilon"] / by_rdp < 0.95
    published = MILLIONS[row["model"]]
    if row["model"] == "nf_resnet_50":  # Published with the 1000 classes of ImageNet.
        published -= 2.049e-3 * (1000 - CLASSES[row["task"]])
    assert report["parameters"] / 1e6 == pytest.approx(published, rel=0.005)
    assert (report["image_height"], report["image_width"]) == (size_of(row), size_of(row))


ERRORS = [
    (dict(dataset="mnits"), "'mnits' is not known.*--dry_run knows: .*cifar10"),
    (dict(dataset="imagenet2012"), "of many sizes: give --image_size"),
]


def test_dry_runs_without_a_table_and_their_errors():
    arguments = dict(dataset="mnist", steps=1, batch_size=9, accountant="rdp")
    report = describe("digits", model="lenet", **arguments)
    assert report["parameters"] == 61_706 and report["accountant"] == "rdp"
    for arguments, message in ERRORS:
        with pytest.raises(UserError, match=message):
            describe("digits", **arguments)


MOST_PARAMETERS = 75e6  # Of all models.
IMAGES_OF_A_FOLDER = 200


@pytest.mark.parametrize(
    "names", [("digits", "folder", "table14/eps8"), nightly(None)], ids=["some", "all"]
)
def test_the_tail_takes_less_of_delta_than_is_kept_back_for_it(names):
    for preset in filter(lambda name: resolve(name).private, names or presets.names()):
        values = resolve(preset, accountant="rdp")  # The faster one.
        whole = tfds.Name.parse(values.dataset).entry.train_images or IMAGES_OF_A_FOLDER
        values, _ = defaults.complete(values, whole)
        plan = values.privacy_plan(whole)
        # A part of a data set, such as some of its classes, has the larger share.
        sampling_probability = min(1.0, 3 * plan.sampling_probability)
        run = (plan.noise_multiplier, sampling_probability, MOST_PARAMETERS, plan.steps)
        added = added_delta(*run, noise.LARGEST_RADIUS) / values.delta
        added += MOST_PARAMETERS / 2 * plan.steps * math.exp(-(noise.LARGEST_RADIUS**2) / 2)
        assert 0 < added < accountants.RESERVED_SHARE / 2 < 1e-3, preset


# The presets with different models, images, views or trained layers.
UPDATES = [
    "table2/baseline", "table2/ema", "table12/eps8", "table13/eps8", "table14/eps8", "table15/eps8",
    "table16/eps8", "table17/eps8", "table18/eps8", "table20/eps8", "table21/all_eps8",
    "table21/last_eps8", "tan/eps8", "dp_mix/eps8",
]  # fmt: skip
SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "preset_update.py"


@pytest.mark.parametrize("preset", UPDATES)
@pytest.mark.nightly
def test_one_update_of_the_model_at_full_image_size(preset):
    process = subprocess.run(
        [sys.executable, str(SCRIPT), preset], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["finite"] and report["changed"], report
    assert report["peak_mib"] < 8_000, report
    is_last = report["trainable"] == "last"
    share = report["trained_parameters"] / report["parameters"]
    assert share < 0.1 if is_last else share == 1
