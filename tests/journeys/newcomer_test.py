"""A user of Opacus or tensorflow-privacy reads the page for newcomers and runs its code."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_of_the_page_runs_and_says_what_was_spent(capsys):
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(compile(code, "coming_from.md", "exec"), names)  # noqa: S102
    text = capsys.readouterr().out
    plan, model = names["plan"], names["model"]
    assert plan.steps == 16 and model.optimizer.ledger.steps == 16
    assert "Epoch 2/2" in text and "8/8" in text
    assert "Privacy budget used up after 16 updates: epsilon=8 at delta=0.0001" in text
    assert float(text.split()[-1]) == pytest.approx(plan.epsilon_at(16))
    assert [type(layer).__name__ for layer in model.layers][1] == "GroupNorm"
    assert type(model.optimizer).__name__ == "DPAdam"


def test_arguments_of_other_libraries_name_those_here():
    import tfdpx
    from tfdpx import _arguments
    from tfdpx.sklearn import PrivateClassifier

    functions = {
        "PrivacyPlan": lambda **other: tfdpx.PrivacyPlan(9, **other),
        "DPAdam": lambda **other: tfdpx.DPAdam(0.1, **other),
        "make_private_model": lambda **other: tfdpx.make_private_model(
            None, num_examples=9, delta=0.1, **other
        ),
        "PrivateClassifier": PrivateClassifier,
    }
    for name, remedy in _arguments.ELSEWHERE.items():
        assert f"| `{name}` | {remedy} |" in PAGE
        with pytest.raises(AttributeError) as error:
            getattr(tfdpx, name)
        assert str(error.value) == f"module 'tfdpx' has no attribute '{name}'. {remedy}"
        for function, call in functions.items():
            with pytest.raises(TypeError) as error:
                call(**{name: 1})
            assert str(error.value) == f"{function} takes no argument `{name}`. {remedy}"


def test_an_optimizer_or_a_model_in_place_of_a_class_is_answered_with_the_code():
    import keras

    import tfdpx

    for wrong in (keras.optimizers.Adam(), keras.Sequential([keras.layers.Dense(1)])):
        with pytest.raises(
            TypeError, match=r"Lion\)\(1e-3, plan=plan\)`, .*_model\(model, ...\)`.$"
        ):
            tfdpx.make_private(wrong)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'$"):
        _ = tfdpx.nonsense


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tensorflow-privacy refuses Python 3.12")
def test_tensorflow_privacy_imports_after_tfdpx():
    code = (
        "import sys; sys.skip_tf_privacy_import = True\n"
        "import tfdpx, tensorflow_privacy\n"
        "from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib as lib\n"
        "print(lib.compute_dp_sgd_privacy_statement(1000, 100, 1.0, 1.0, 1e-5, False))"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "Epsilon assuming Poisson sampling" in process.stdout
