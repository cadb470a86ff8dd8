"""docs/flags.md and docs/presets.md match the programs and the presets."""

import pytest
import reference_pages


@pytest.mark.skipif(not (reference_pages.DOCS / "flags.md").exists(), reason="needs a checkout")
def test_the_pages_are_current():
    for path, text in reference_pages.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run tools/reference_pages.py"


def test_a_default_is_shown_of_the_flag_or_else_of_the_settings():
    page = reference_pages.flags_page()
    assert (
        "| `--sampling` | `poisson`, `shuffle`. How batches are drawn. Default: `poisson`. |"
        in page
    )
    assert "to try a strategy out. Default: `1`. |" in page
