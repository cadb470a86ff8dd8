"""Trainings for the tables of docs/support.md: some features, trained in some way."""

import contextlib
import json
import os
import tempfile

import engines
import keras
import numpy as np
import replica_cases
import tensorflow as tf

import tfdpx
from tfdpx.accounting import IndividualAccountant
from tfdpx.accounting.statement import is_unknown

ROWS, STEPS = 40, 2


def data():
    """Draws examples [40, 4, 4, 1] and labels [40]."""
    rng = np.random.default_rng(0)
    return rng.uniform(size=(ROWS, 4, 4, 1)).astype("float32"), rng.integers(0, 3, ROWS)


# From the words of the tables to arguments of the plan, of the optimizer (a function of the plan, x
# and y) and of `fit`, to data in place of x and y, and to the optimizer's class.
FEATURES = {
    "arrays, Poisson sampling": {},
    "full batches": {"plan": {"batch_size": ROWS}},
    '`sampling="shuffle"`': {"plan": {"sampling": "shuffle"}},
    "your `tf.data.Dataset`": {
        "data": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    },
    "`RandomAccess`": {"data": lambda x, y: tfdpx.RandomAccess(list(zip(x, y, strict=True)))},
    '`unit="user"`': {
        "plan": {"num_examples": 10, "batch_size": 4, "unit": "user"},
        "fit": {"user_ids": np.arange(ROWS) % 10, "examples_per_user": 2},
    },
    "`validation_split`": {"plan": {"num_examples": 30}, "fit": {"validation_split": 0.25}},
    "`class_weight`": {"fit": {"class_weight": {0: 4.0}}},
    "`DPAdam`": {"make": tfdpx.DPAdam},
    "`make_private`": {"make": tfdpx.make_private(keras.optimizers.Lion)},
    '`"automatic"` clip': {"optimizer": lambda *_: {"l2_norm_clip": "automatic"}},
    "`AdaptiveClip`": {"optimizer": lambda *_: {"l2_norm_clip": tfdpx.AdaptiveClip()}},
    "`individual`": {"optimizer": lambda plan, *_: {"individual": IndividualAccountant(plan)}},
    "`augment`, `augmult`": {
        "optimizer": lambda *_: {"augment": tfdpx.augment.RandomCropFlip(1), "augmult": 2}
    },
    "`mixed_bfloat16`": {"policy": "mixed_bfloat16"},
    "mapped": {"engine": "mapped"},
    '`accountant="rdp"`': {"plan": {"accountant": "rdp"}},
}


def outcome(way, *names):
    """Returns the result of a training: "yes", "approx.", "no limit" or the text of the error.

    Args:
        way: String, the head of a column.
        *names: Keys of `FEATURES`.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            optimizer = _train(way, [FEATURES[name] for name in names], folder)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    assert optimizer.ledger.steps == (1 if way == "`train_on_batch`" else STEPS)
    assert 0 < optimizer.ledger.epsilon(1e-3) < np.inf
    approximate = "no limit" if is_unknown(optimizer.ledger) else "approx."
    return approximate if optimizer.epsilon_is_approximate else "yes"


def _train(way, features, folder):
    def merged(key):
        return {k: v for feature in features for k, v in feature.get(key, {}).items()}

    def last(key, default):
        return [default, *(feature[key] for feature in features if key in feature)][-1]

    (x, y), callbacks = data(), []
    plan_arguments = {
        "num_examples": ROWS,
        "batch_size": 10,
        "noise_multiplier": 1.0,
        **merged("plan"),
    }
    plan = tfdpx.PrivacyPlan(steps=STEPS, delta=1e-3, **plan_arguments)
    arguments, is_mapped = {}, way == "mapped" or last("engine", None) == "mapped"
    for feature in features:
        arguments |= feature.get("optimizer", lambda *_: {})(plan, x, y)
    if way == "`Checkpoint`":
        callbacks.append(tfdpx.callbacks.Checkpoint(folder))
    if as_source := last("data", None):
        x, y = as_source(x, y), None
        if isinstance(x, tf.data.Dataset):
            callbacks.append(tfdpx.PrivacyBudget(plan, allow_approximate=True))
    strategy = replica_cases.strategies()[1] if "replicas" in way else None
    keras.config.set_dtype_policy(last("policy", "float32"))
    stack = contextlib.ExitStack()
    stack.enter_context(engines.mapping() if is_mapped else contextlib.nullcontext())
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
            model = keras.Sequential(layers)
            optimizer = last("make", tfdpx.DPSGD)(0.1, plan=plan, **arguments)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, jit_compile=way == "XLA")
        if way == "`train_on_batch`":
            model.train_on_batch(*(rows[: plan_arguments["batch_size"]] for rows in data()))
            return optimizer
        fitted = [x] if y is None else [x, y]
        how = {"epochs": 2, "verbose": 0, "callbacks": callbacks, **merged("fit")}
        if "distributed.fit" in way:
            tfdpx.distributed.fit(model, plan, *fitted, **how)
        else:
            model.fit(*fitted, **how)
        assert not is_mapped or all(ran.startswith("mapped") for ran in optimizer.independence)
        return optimizer
    finally:
        stack.close()
        keras.config.set_dtype_policy("float32")


def tried():
    """A case for `processes.run_alone`: replaces the list in a file by its outcomes."""
    with open(os.environ["SUPPORT_MATRIX"], "r+", encoding="utf-8") as file:
        outcomes = [outcome(*training) for training in json.load(file)]
        file.seek(0)
        file.truncate()
        json.dump(outcomes, file)
