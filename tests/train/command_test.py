"""`tfdpx PROGRAM ...`, as an installation puts it on the path."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags
from cases import nightly, slow

import tfdpx
from tfdpx.train import classify, command, errors

PLAN = "--num_examples=1000 --batch_size=100 --steps=10 --noise_multiplier=2 --delta=1e-5"
PROGRAM = os.path.join(os.path.dirname(sys.executable), "tfdpx")
pytestmark = pytest.mark.skipif(not os.path.exists(PROGRAM), reason="another environment's package")


def run(*arguments, stdout=subprocess.PIPE):
    """Runs a command without the tests' setting of TensorFlow's log."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    outputs = dict(stdout=stdout, stderr=subprocess.PIPE, text=True)
    return subprocess.run(arguments, **outputs, timeout=120, env=environment)


def test_help_and_version_name_all_programs_without_tensorflow():
    files = pathlib.Path(command.__file__).parent.glob("*.py")
    programs = [path.stem for path in files if "\n    start_program(main)" in path.read_text()]
    assert sorted(programs) == sorted(command.PROGRAMS)
    code = "import sys; from tfdpx.train import command; command.main(); print(*sys.modules)"
    output = run(sys.executable, "-c", code).stdout
    assert all(re.search(rf"^  {name} +\w.*\.$", output, re.MULTILINE) for name in programs)
    assert "tensorflow" not in output.splitlines()[-1].split()
    assert run(PROGRAM, "--version").stdout == f"tfdpx {tfdpx.__version__}\n"


@pytest.mark.slow
def test_a_program_answers():
    program = run(PROGRAM, "plan", *PLAN.split())
    assert program.returncode == 0 and not program.stderr
    assert '"epsilon": ' in program.stdout


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("--delta=abc", "Flag --delta must be a number. Received: --delta=abc."),
        ("--steps=60,000", "Flag --steps .*: --steps=60,000. Leave out commas and signs."),
        ("--right_guesses=65%", "Flag --right_guesses .*65%. Leave out commas and signs."),
        ("--epsilon", "Flag --epsilon must be a number. Received: --epsilon=."),
        ("--epsilom=3", "There is no flag --epsilom. Did you mean 'epsilon'? --help lists .* all."),
        ("--sample_rate=.1", "no flag --sample_rate. Write --batch_size, the rate times `num_ex"),
        ("--target_delta", "There is no flag --target_delta. Write --delta. --help lists"),
    ],
)
def test_a_wrong_flag_is_one_sentence(typed, sentence, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train/classify.py", typed])
    with pytest.raises(SystemExit) as error:
        errors.start_program(None)
    assert re.match(f"tfdpx.train.classify: .*{sentence.replace('?', '[?]')}", error.value.code)


@pytest.mark.slow
def test_a_program_ends_quietly_if_nobody_reads_its_output():
    reader, writer = os.pipe()
    os.close(reader)
    process = run(PROGRAM, "plan", *PLAN.split(), stdout=writer)
    os.close(writer)
    assert (process.returncode, process.stderr) == (1, "")


def test_help_lists_what_can_be_asked_for_and_a_slip_is_understood():
    text = flags.FLAGS.module_help(classify)
    for name in ("epsilon", "dataset", "workdir", "resume", "dry_run", "head"):
        assert f"--{name}:" in text or f"--[no]{name}:" in text, name
    assert "--strategy:" not in text and "--strategy:" in str(flags.FLAGS)  # Shown by --helpfull.
    assert len(text.splitlines()) < 60
    with pytest.raises(flags.UnrecognizedFlagError, match="Did you mean: epsilon"):
        flags.FLAGS(["classify", "--epsilom=3"])


def test_a_resume_is_told_as_the_command_was_typed(monkeypatch):
    monkeypatch.setattr(command.runpy, "run_module", lambda *arguments, **more: None)
    monkeypatch.setattr(command, "_typed", {})
    monkeypatch.setattr(sys, "argv", ["my env/bin/tfdpx", "classify", "--resume"])
    command.main()
    assert command.typed("classify") == "'my env/bin/tfdpx' classify"
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m"])
    assert command.typed("sweep") == ".venv/bin/python -m tfdpx.train.sweep"


def test_other_names_are_refused_in_one_line():
    result = run(PROGRAM, "clasify")
    assert result.returncode == 1 and not result.stdout
    (line,) = result.stderr.splitlines()
    assert "'clasify'" in line and "Did you mean 'classify'?" in line and "sweep" in line


# The others of these run in other tests.
@pytest.mark.parametrize(
    "program", [slow(p) if p in ("predict", "sweep") else nightly(p) for p in command.PROGRAMS]
)
def test_every_program_starts_and_lists_its_flags(program):
    process = run(PROGRAM, program, "--help")
    assert process.returncode == 1 and "--" in process.stdout, process.stderr[-2000:]
    assert not process.stderr
