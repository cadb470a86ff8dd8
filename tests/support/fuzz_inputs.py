"""Random plans, flags, ledgers and files: each is accepted, or refused by an error of tfdpx."""

import contextlib
import io
import math
import pathlib
import warnings
import zipfile

from hypothesis import strategies as st

import tfdpx
from tfdpx import _files as files
from tfdpx.accounting import Ledger
from tfdpx.callbacks import BudgetExceeded, Checkpoint

ROOT = pathlib.Path(tfdpx.__file__).resolve().parents[1]
CHECKPOINT = "tfdpx-checkpoint.zip"
ERRORS = (ValueError, TypeError, BudgetExceeded, OSError)

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(1, 10**7),
    st.integers(10**12, 10**30),
    st.floats(),
    st.floats(1e-3, 100.0),
    st.sampled_from([None, "", "3", True, b"x", [], (1,), 1e-300, 1e300, 2**63, math.nan]),
)
PLANS = st.dictionaries(
    st.sampled_from(["batch_size", "steps", "noise_multiplier", "epsilon"]), NUMBERS, max_size=4
).flatmap(
    lambda arguments: st.fixed_dictionaries(
        {
            **{name: st.just(value) for name, value in arguments.items()},
            "num_examples": st.one_of(st.integers(1, 10**6), NUMBERS),
            "delta": st.one_of(st.floats(1e-12, 0.1), NUMBERS),
            "accountant": st.sampled_from(["rdp", "pld", "gdp", "zcdp", "", None, 3]),
            "sampling": st.sampled_from(["poisson", "poisson", "shuffle", "", None]),
        }
    )
)
SENSIBLE_PLANS = st.tuples(
    st.fixed_dictionaries(
        {
            "num_examples": st.integers(10, 10**6),
            "batch_size": st.integers(1, 10**4),
            "steps": st.integers(1, 10**4),
            "noise_multiplier": st.floats(0.3, 30.0),
            "epsilon": st.floats(0.01, 50.0),
            "delta": st.floats(1e-9, 1e-3),
            "accountant": st.just("rdp"),
        }
    ),
    st.sampled_from(["noise_multiplier", "steps", "batch_size", "epsilon"]),
).map(lambda pair: {name: v for name, v in pair[0].items() if name != pair[1]})


def is_ours(error):
    """Returns whether a file of the package raised an error, of a type that tfdpx raises."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    path = pathlib.Path(trace.tb_frame.f_code.co_filename).resolve()
    inside = any((ROOT / part) in path.parents for part in ("tfdpx", "layers", "models", "train"))
    return isinstance(error, ERRORS) and inside


@contextlib.contextmanager
def only_our_errors():
    """Accepts an error of tfdpx as an answer; any other is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except BaseException as error:
        if not is_ours(error):
            raise


def check_plan(arguments):
    """A plan keeps its promises, or is refused."""
    with only_our_errors():
        plan = tfdpx.PrivacyPlan(**arguments)
        spent = plan.epsilon_at(plan.steps)
        assert spent >= 0 and not math.isnan(spent)
        if arguments.get("epsilon") is not None:
            assert spent <= plan.epsilon
        assert 1 <= plan.capacity <= plan.num_examples
        assert tfdpx.PrivacyPlan.from_config(plan.get_config()) == plan


SAVED_LEDGER = Ledger(
    (
        tfdpx.accounting.ledger.Entry(1.5, 0.25, 7, run=12345),
        tfdpx.accounting.ledger.Entry(2.0, None, 3, poisson_sampled=False, run=99),
    )
).to_json()


@st.composite
def damage(draw, size):
    """Draws a change to about this many bytes, for example a cut or a flipped byte."""
    kind = draw(st.sampled_from(["cut", "flip", "flip", "insert", "remove", "other"]))
    place = draw(st.integers(0, max(size - 1, 0)))
    more = draw(st.binary(min_size=1, max_size=40))
    return kind, place, more


def damaged(content, how):
    """Returns `content` after a `damage`."""
    kind, place, more = how
    place = min(place, max(len(content) - 1, 0))
    if kind == "cut":
        return content[:place]
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ (more[0] or 1)]) + content[place + 1 :]
    if kind == "insert":
        return content[:place] + more + content[place:]
    if kind == "remove":
        return content[:place] + content[place + len(more) :]
    return more


def check_ledger(how):
    """A damaged ledger is refused, or can be read as a ledger."""
    text = damaged(SAVED_LEDGER.encode(), how).decode("latin-1")
    with only_our_errors():
        ledger = Ledger.from_json(text)
        assert all(entry.steps >= 1 for entry in ledger.entries)
        epsilon = ledger.assuming(0.5).epsilon(1e-5, "rdp")
        assert epsilon >= 0
        assert Ledger.from_json(ledger.to_json()) == ledger


def check_checkpoint(whole, folder, how):
    """A damaged checkpoint is refused, or the saved values are restored.

    Args:
        whole: Path of a folder with a whole checkpoint.
        folder: Path of another folder for the damaged copy.
        how: A `damage`.
    """
    content = (whole / CHECKPOINT).read_bytes()
    (folder / CHECKPOINT).write_bytes(damaged(content, how))
    try:
        record, restored = Checkpoint(folder)._read()
    except ValueError as error:
        assert "is damaged: " in str(error) and is_ours(error), repr(error)
        return
    saved = parts(content)
    assert record == files.opened(saved.pop("record.json"), record["format"])
    assert restored == saved


def parts(content):
    """Returns `{name: bytes}` of the members of a checkpoint's file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def flag_strategy(settings_class):
    """Draws dicts of values from the command line for the fields of a dataclass of settings."""
    import dataclasses

    values = {}
    for field in dataclasses.fields(settings_class):
        choices = field.metadata["choices"]
        kinds = str(field.type)
        some = []
        if choices:
            some.append(st.sampled_from([*choices, "none of them"]))
        elif "bool" in kinds:
            some.append(st.booleans())
        elif "float" in kinds:
            some.append(st.one_of(st.floats(), st.floats(0.01, 10.0)))
        elif "int" in kinds:
            some.append(st.one_of(st.integers(-2, 2**40), st.integers(1, 100)))
        elif "list" in kinds:
            some.append(st.lists(st.sampled_from(["", "1", "x", "1e3", "nan"]), max_size=3))
        else:
            some.append(st.sampled_from(["", "digits", "cifar10", "nothing", "wrn_16_4", "../x"]))
        values[field.name] = st.one_of(st.none(), *some)
    return values


def flags():
    """Draws dicts of a preset and a few flags of `classify`."""
    from tfdpx.train import presets, settings

    values = flag_strategy(settings.Settings)
    few = st.sets(st.sampled_from(sorted(values)), max_size=4)
    flag_values = few.flatmap(lambda names: st.fixed_dictionaries({n: values[n] for n in names}))
    return st.tuples(st.sampled_from([*presets.names(), "", "nothing", "table12/x"]), flag_values)


def check_flags(preset_and_flags):
    """Flags give settings and a plan, or a line that says what is wrong."""
    from tfdpx.train import defaults, settings
    from tfdpx.train.errors import UserError

    preset, flag_values = preset_and_flags
    with contextlib.suppress(UserError), only_our_errors(), contextlib.redirect_stdout(None):
        values, _ = defaults.complete(settings.resolve(preset, flag_values), 50_000)
        plan = values.privacy_plan(50_000)
        assert plan.epsilon >= 0
