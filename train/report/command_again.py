"""The command that trains the same again, as far as a record knows it: no seed and no path."""

import dataclasses
import shlex

from tfdpx.accounting.record import plain
from tfdpx.train.config import preset_lookup, pretraining
from tfdpx.train.config.training import OF_FILE, PRIVACY
from tfdpx.train.data import tfds

# Without these the rest of a preset cannot be looked up.
_FIRST = ("dataset", "private", *PRIVACY, "delta")


def of(record):
    """The command of a `Record`, a string, a flag a line; None where a search chose the run.

    Files and folders are named by the ends of their paths, which is all that a record has.
    """
    if record.searched or record.program not in _GIVEN:
        return None
    given = {name: plain(v) for name, v in _GIVEN[record.program](record).items() if v is not None}
    given = [f"--{name}={shlex.quote(_text(value))}" for name, value in given.items()]
    return " \\\n  ".join([f"tfdpx {record.program}", *given])


def _of_classify(record):
    settings = record.settings
    if tfds.Name.parse(settings["dataset"]).entry.name in tfds.TABLES:
        # On the call: it defines flags, which are those of other programs too.
        from tfdpx.train.tables.settings import TableSettings

        usual = {field.name: field.default for field in dataclasses.fields(TableSettings)}
        always = {name: settings[name] for name in ("dataset", "target", "epsilon", "delta")}
        return always | _differing(settings, usual)
    first = {name: settings[name] for name in _FIRST if settings[name] is not None}
    if not settings["private"]:
        del first["noise_multiplier"]  # It is 0, which --private=false says.
    preset = preset_lookup.default_for(settings["dataset"])
    usual = dataclasses.asdict(preset_lookup.resolve(preset, first))
    if settings["private"]:
        del first["private"]
    more = _differing(settings, usual)
    if settings["model"] == OF_FILE:  # --init_from says it.
        more.pop("model", None)
    return first | more


def _of_pretrain(record):
    settings = record.settings
    usual = dataclasses.asdict(pretraining.resolve("digits", {}))
    return {"recipe": "digits", "dataset": settings["dataset"]} | _differing(settings, usual)


def _of_features(record):
    settings = record.settings
    return {
        "init_from": settings.get("backbone"),
        "dataset": record.data.name,
        **{name: settings.get(name) for name in ("init_data", "pixels", "image_size")},
        "skip_broken": True if settings.get("left_out") else None,
        **{name: settings.get(name) for name in ("method", "epsilon", "delta")},
    }


_GIVEN = {
    "classify": _of_classify,
    "pretrain": _of_pretrain,
    "features": _of_features,
    "adamix": lambda record: record.settings,
}


def _differing(settings, usual):
    usual = plain(usual)
    return {name: value for name, value in settings.items() if plain(value) != usual.get(name)}


def _text(value):
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
