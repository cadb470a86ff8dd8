"""Writes the tables of docs/flags.md and docs/presets.md, from the programs themselves.

.venv/bin/python tools/reference_pages.py
"""

import dataclasses
import importlib
import inspect
import pathlib
import re

from absl import flags

from tfdpx.train.command import PROGRAMS
from tfdpx.train.config import preset_lookup
from tfdpx.train.config.training import Training
from tfdpx.train.tables.settings import TableSettings

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
MARK = "<!-- What follows is made by tools/reference_pages.py. -->\n"


def settings_of(program):
    """The settings of a program: their flags are unset, so that a preset can say another value."""
    if program == "classify":
        return [TableSettings, Training]
    # Imported on the call, because it defines flags that classify has not.
    module = importlib.import_module(f"tfdpx.train.{program}")
    return [module.Pretraining] if program == "pretrain" else []


def flags_of(program):
    """The flags that a program takes, by name, a dict; those of absl left out."""
    module = importlib.import_module(f"tfdpx.train.{program}")
    if hasattr(module, "define_flags"):
        values = flags.FlagValues()
        module.define_flags(values)
        return {name: values[name] for name in values}
    found = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(module)}
    if program == "pretrain":  # It shares others with classify, which defines them.
        shared = [field.name for field in dataclasses.fields(module.Pretraining)]
        found |= {name: flags.FLAGS[name] for name in (*shared, "workdir", "data_dir", "resume")}
    return found


def flags_page():
    """What docs/flags.md has below the mark."""
    parts = []
    for program in PROGRAMS:
        summary = inspect.getdoc(importlib.import_module(f"tfdpx.train.{program}")).split("\n")[0]
        parts.append(f"\n## {program}\n\n{summary}\n\n| flag | |\n|---|---|\n")
        fields = [f for each in settings_of(program) for f in dataclasses.fields(each)]
        defaults = {field.name: field.default for field in fields}
        for name, flag in sorted(flags_of(program).items()):
            default = defaults.get(name) if flag.default is None else flag.default
            known = default not in (None, "", dataclasses.MISSING)
            shown = f" Default: `{str(default).lower()}`." if known else ""
            parts.append(f"| `--{name}` | {_marked(flag.help)}{shown} |\n")
    return "".join(parts)


def _marked(text):
    """The help of a flag as Markdown in a cell."""
    text = " ".join(text.replace(preset_lookup.summary(), "[presets.md](presets.md)").split())
    words = re.match("<(.*?)>: ", text)  # Those that a flag takes.
    if words:
        text = f"`{words[1].replace('|', '`, `')}`. {text[words.end() :]}"
    text = re.sub(r"--\w+(=[\w:./+*]*\w\*?)?|\b[A-Z]+(/\(?\w+\)?)*/[\w*.]+", r"`\g<0>`", text)
    return text.replace("|", "\\|").replace("_<", "\\_<").replace("<", "&lt;")


def presets_page():
    """What docs/presets.md has below the mark."""
    names, parts = preset_lookup.names(), []
    for name in dict.fromkeys(preset.partition("/")[0] for preset in names):
        module = importlib.import_module(f"tfdpx.train.presets.{name}")
        epsilon = getattr(module, "EPSILON", None)
        rows = {
            f"`{name}/{column}`": values
            for column, values in vars(module).get("COLUMNS", {}).items()
        }
        rows = {"all": module.COMMON, **rows} if rows else {f"`{name}`": module.settings}
        text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", inspect.getdoc(module))
        parts.append(f"\n## {name}\n\n{text}\n\n| | settings |\n|---|---|\n")
        for title, values in rows.items():
            at = ""
            if callable(values):
                values, at = values(epsilon), f" at epsilon {epsilon:g}"
            cell = ", ".join(
                f"`{key}={value}`" for key, value in values.items() if value is not None
            )
            parts.append(f"| {title}{at} | {cell} |\n")
    return "".join(parts)


def pages():
    """`{path: text}` of both pages, as they should be."""
    made = {DOCS / "flags.md": flags_page(), DOCS / "presets.md": presets_page()}
    heads = {path: path.read_text(encoding="utf-8").partition(MARK)[0] for path in made}
    return {path: heads[path] + MARK + text for path, text in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
