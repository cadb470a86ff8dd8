"""Checks the links of the pages, their quotations of the source, and their figures."""

import ast
import math
import pathlib
import re

import pytest
from scipy.stats import norm

import tfdpx

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAQ = ROOT / "docs" / "faq.md"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "experiments/**/*.md", "tfdpx/**/*.md")
    for path in ROOT.glob(pattern)
)
pytestmark = pytest.mark.skipif(not FAQ.exists(), reason="needs a checkout")


def test_every_link_to_a_file_leads_to_one():
    for page in PAGES:
        path = ROOT / page
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        files = [link for link in links if not re.match(r"\w+:", link)]
        assert [file for file in files if not (path.parent / file).exists()] == [], page


def test_commands_fold_at_80_columns():
    """No flag is cut off on a page or in a terminal."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        assert [line for b in blocks for line in b.splitlines() if len(line) > 80] == [], page


def texts():
    """Yields every string of the package, with "..." in place of an f-string's values."""
    for folder in ("tfdpx", "layers", "models", "train"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", None) for part in node.values]
                    yield "".join(part if isinstance(part, str) else "..." for part in parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def missing(quotes):
    """Returns the quotes that no string contains, with all parts between "..." in order."""
    strings = list(texts())

    def pattern(quote):
        return re.compile(".*".join(map(re.escape, quote.split("..."))), re.DOTALL)

    return [quote for quote in quotes if not any(map(pattern(quote).search, strings))]


def test_errors_that_the_page_quotes_are_in_the_source():
    quotes = re.findall(r"^> (.*)$", FAQ.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quotes) >= 20
    assert missing(quotes) == []
    assert missing(["The plan counts on shuffled batches"])


def test_guesses_that_epsilon_allows_an_attacker():
    page = (ROOT / "docs" / "epsilon.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\d.]+) \| (.*?)% \| (.*?)% \| (.*?)% \| (.*?)% \|$", page, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["0", "0.5", "1", "2", "3", "8", "20"]
    delta, false = 1e-5, 0.01
    for epsilon, *percentages in rows[1:]:
        budget = {"batch_size": 100, "steps": 200, "epsilon": float(epsilon), "accountant": "gdp"}
        mu = math.sqrt(200) / tfdpx.PrivacyPlan(100, delta=delta, **budget).noise_multiplier
        factor = math.exp(float(epsilon))
        right = (factor + delta) / (1 + factor)
        true_rate = min(factor * false + delta, 1 - (1 - delta - false) / factor)
        of_gaussian = norm.cdf(mu / 2), norm.cdf(norm.ppf(false) + mu)
        exact = [right, of_gaussian[0], true_rate, of_gaussian[1]]
        for text, value in zip(percentages, exact, strict=True):
            digits = len(text.partition(".")[2])
            assert float(text) == pytest.approx(100 * value, abs=0.51 * 10**-digits)
