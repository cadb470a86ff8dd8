"""What finished runs have spent on one data set together: one statement for all of them."""

import dataclasses
import json
import math
import pathlib

from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.samplings import Sampling
from tfdpx.train.config.errors import UserError

REPORT, HEAD_LEDGER, HEAD = "report.json", "head.ledger.json", "head.json"

_NEEDED = ("noise_multiplier", "sampling_probability", "steps", "sampling", "delta", "num_examples")


@dataclasses.dataclass(frozen=True)
class Run:
    """What one folder or file says was done to the data.

    Args:
        path: `pathlib.Path`.
        about: String, a line on it.
        ledger: `Ledger` of noisy updates, whose losses compose.
        epsilon: Float, of what is no Gaussian update and adds up with all else.
        added_delta: Float, the delta of `epsilon`.
        delta: Float that its own report is for, or None.
        num_examples: Int or None.
        shuffled: Bool, whether batches were cut from permutations.
        seeded: Bool, whether somebody chose the seed.
        lower_bound: Float that an attack has proven epsilon to have at least, or None.
        confidence: Float, of `lower_bound`.
    """

    path: pathlib.Path
    about: str
    ledger: Ledger = Ledger()
    epsilon: float = 0.0
    added_delta: float = 0.0
    delta: float | None = None
    num_examples: int | None = None
    shuffled: bool = False
    seeded: bool = False
    lower_bound: float | None = None
    confidence: float | None = None


def read(path):
    """The `Run` of a working folder, of a ledger's file, or of an audit's report.

    Args:
        path: String.

    Raises:
        UserError: If nothing there says what was spent.
    """
    path = pathlib.Path(path).expanduser()
    if (path / REPORT).is_file():
        return _of_report(path, _json(path / REPORT))
    if (path / HEAD_LEDGER).is_file():
        return _of_head(path)
    if path.is_file():
        content = _json(path)
        if "epsilon_lower_bound" in content:
            return _of_report(path, content)
        with_name = f"ledger, {path.name}"
        try:
            return Run(path, with_name, Ledger.load(path))
        except ValueError as error:
            raise UserError(f"Received: --workdir={path}. {error}") from error
    if (path / "checkpoint").is_dir():
        raise UserError(
            f"The run in {path} is not finished, and only its secret checkpoint knows what it has "
            "spent: finish it with --resume, or restore its model and read "
            f"`model.optimizer.ledger`. Received: --workdir={path}."
        )
    raise UserError(
        f"Nothing in {path} says what was spent: it has neither {REPORT} nor {HEAD_LEDGER}, and is "
        f"no file of a ledger. Received: --workdir={path}. Name the folder of a finished run."
    )


def _of_report(path, report):
    if "epsilon_lower_bound" in report:
        return Run(
            path,
            "audit",
            delta=report.get("delta"),
            lower_bound=float(report["epsilon_lower_bound"]),
            confidence=report.get("confidence"),
        )
    missing = [name for name in _NEEDED if name not in report]
    if missing:
        raise UserError(
            f"The report in {path} does not say what was spent: it has no "
            f"{', '.join(missing)}. Received: --workdir={path}. Name a folder of "
            "tfdpx.train.classify or tfdpx.train.features."
        )
    shuffled = report["sampling"] == "shuffle"
    entry = Entry(
        noise_multiplier=float(report["noise_multiplier"]),
        sampling_probability=report["sampling_probability"],
        steps=report["steps"],
        exact=not shuffled and not report.get("epsilon_is_approximate", False),
    )
    about = (
        f"{report.get('model')} on {report.get('dataset')}: {entry.steps} updates at noise "
        f"multiplier {entry.noise_multiplier:.4g} and sampling probability "
        f"{entry.sampling_probability:.4g}, {report['sampling']} sampling"
    )
    released = report.get("individual_release_epsilon")
    if released is not None:
        about += f"; statistics of individual epsilons at epsilon {released:.4g}"
    return Run(
        path,
        about,
        Ledger((entry,)),
        epsilon=released or 0.0,
        added_delta=report["delta"] or 0.0 if released else 0.0,
        delta=report["delta"],
        num_examples=report["num_examples"],
        shuffled=shuffled,
        seeded=bool(report.get("seeded")),
    )


def _of_head(path):
    report = _json(path / HEAD) if (path / HEAD).is_file() else {}
    about = f"head {report.get('method', '')}: Gaussian releases of full batches"
    delta, count = report.get("delta"), report.get("num_examples")
    if "epsilon_of_a_run" in report:  # The best of several private runs: what that costs adds up.
        about += f", the best of several runs, at epsilon {report['epsilon']:.4g} for all of them"
        return Run(
            path, about, epsilon=float(report["epsilon"]), added_delta=delta, num_examples=count
        )
    if report.get("search_is_private") is False:
        about += "; its arguments were searched for on the same data, which this does not cover"
    return Run(path, about, Ledger.load(path / HEAD_LEDGER), delta=delta, num_examples=count)


def _json(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no report and no ledger.")
    return content


@dataclasses.dataclass(frozen=True)
class Total:
    """What several runs on the same data have spent together.

    Their Gaussian updates compose; what is no such update adds its own epsilon and delta. Where a
    run was shuffled, neighbours are those of shuffling for all: for Poisson samples and full
    batches an example that is emptied costs what one that is removed does.

    Args:
        runs: Tuple of `Run`.
        delta: Float for the updates, or None for that of the reports.

    Raises:
        UserError: If the reports are for different deltas or numbers of examples.
    """

    runs: tuple
    delta: float | None = None

    def __post_init__(self):
        deltas = {run.delta for run in self.runs} - {None}
        if self.delta is None:
            if len(deltas) != 1:
                found = ", ".join(f"{delta:g}" for delta in sorted(deltas)) or "none"
                raise UserError(f"Give --delta: the runs have no one delta. Found: {found}.")
            object.__setattr__(self, "delta", deltas.pop())
        counts = {run.num_examples for run in self.runs} - {None}
        if len(counts) > 1:
            raise UserError(
                "These runs are not of one data set, so nothing composes: they have "
                f"{', '.join(map(str, sorted(counts)))} examples. Give a statement for each."
            )
        object.__setattr__(self, "_num_examples", counts.pop() if counts else None)

    @property
    def num_examples(self):
        """Int, or None where no run says it."""
        return self._num_examples

    @property
    def neighbours(self):
        """Which data sets are neighbours."""
        return "zero_out" if any(run.shuffled for run in self.runs) else "add_or_remove_one"

    @property
    def is_approximate(self):
        """Bool: whether any batches were drawn in a way that no accountant here judges."""
        return any(not e.exact for run in self.runs if not run.shuffled for e in run.ledger.entries)

    @property
    def total_delta(self):
        """Float: the delta of all together."""
        return self.delta + sum(run.added_delta for run in self.runs)

    @property
    def steps(self):
        """Int: noisy updates of all runs."""
        return sum(run.ledger.steps for run in self.runs)

    @property
    def lower_bound(self):
        """Float: the most that an attack has proven; None without an audit."""
        return max((r.lower_bound for r in self.runs if r.lower_bound is not None), default=None)

    def epsilon_by(self, accountant):
        """Epsilon of all at `total_delta`, by "pld" or "rdp"; None where it cannot be resolved.

        Args:
            accountant: "pld" or "rdp".
        """
        together = sum((self._judged(run) for run in self.runs), Ledger())
        try:
            spent = together.epsilon(self.delta, accountant)
        except ValueError:
            return None
        return spent + sum(run.epsilon for run in self.runs)

    @staticmethod
    def _judged(run):
        """The run's ledger as an accountant is to be asked."""
        if not run.shuffled:
            return run.ledger
        entries = []
        for entry in run.ledger.entries:
            facts = (entry.noise_multiplier, entry.sampling_probability, entry.steps)
            noise, probability, steps = Sampling("shuffle").run(*facts)
            entries.append(Entry(noise, probability, steps))
        return Ledger(tuple(entries))

    @property
    def is_seeded(self):
        """Bool: whether somebody has given the seed of draws or noise of a run."""
        return any(run.seeded or run.ledger.is_seeded for run in self.runs)

    def record(self):
        """Dict of JSON values."""
        spent = self.epsilon_by("pld")
        return {
            "solved": "epsilon",
            "runs": len(self.runs),
            "num_examples": self.num_examples,
            "steps": self.steps,
            "delta": self.total_delta,
            "epsilon": spent,
            "epsilon_pld": spent,
            "epsilon_rdp": self.epsilon_by("rdp"),
            "neighbours": self.neighbours,
            "epsilon_is_approximate": self.is_approximate,
            "epsilon_lower_bound": self.lower_bound,
            "releasable": spent != math.inf and not self.is_seeded,
        }

    def statement(self):
        """The guarantee of all runs together, in words.

        Raises:
            UserError: If an audit has proven more than the account says.
        """
        spent = self.epsilon_by("pld")
        lines = ["What was done to the data:"]
        lines += [f"- {run.path}: {run.about}." for run in self.runs]
        if spent == math.inf:
            return "\n".join([*lines, "", "There was no noise: epsilon is infinite."])
        about = "about " if self.is_approximate else ""
        lines += [
            "",
            f"All together are {about}({spent:.4g}, {self.total_delta:.3g})-differentially private "
            f"under {_NEIGHBOURS[self.neighbours]}: by privacy loss distributions of "
            "dp_accounting. The number of examples is public.",
        ]
        if self.neighbours == "zero_out":
            lines.append(f"For shuffled batches this is {Sampling('shuffle').about}.")
        if self.is_approximate:
            lines.append(
                "Some batches were not drawn by a plan, so nobody knows their sampling: they count "
                "as if they were Poisson samples, which no theorem covers."
            )
        if any(run.epsilon for run in self.runs):
            lines.append("What is no Gaussian update adds its own epsilon and delta.")
        if self.is_seeded:
            lines.append(
                "Not releasable: a run had a seed that somebody chose, and who knows it can remove "
                "the noise."
            )
        if self.lower_bound is not None:
            if self.lower_bound > spent and not self.is_approximate:
                raise UserError(
                    f"An audit has proven epsilon to be at least {self.lower_bound:.4g}, and the "
                    f"account says {spent:.4g}: the guarantee is broken, or the audit is of other "
                    "runs. Do not release anything."
                )
            lines.append(
                f"An attack has proven that epsilon is at least {self.lower_bound:.4g}: no "
                "contradiction. It would not see what it did not look for."
            )
        return "\n".join(lines)


_NEIGHBOURS = {
    "add_or_remove_one": "adding or removing one example",
    "zero_out": "emptying the place of one example",
}
