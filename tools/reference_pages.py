"""Writes the tables of docs/flags.md and the lists of docs/presets.md from the programs.

.venv/bin/python tools/reference_pages.py
"""

import dataclasses
import importlib
import inspect
import pathlib
import re

from absl import flags

from tfdpx.train import presets
from tfdpx.train.command import PROGRAMS
from tfdpx.train.objects import AUGMENTATIONS, HEADS, MODELS, OPTIMIZERS, SCHEDULES, explanations
from tfdpx.train.settings import Settings

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
# On the command line these flags have no default, so a preset can set them. The defaults are here.
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Settings)}
# Flags of `classify` that are not fields of `Settings`.
_OTHERS = "preset workdir data_dir download resume dry_run strategy tpu cpu_devices".split()
MARK = "<!-- What follows is made by tools/reference_pages.py. -->\n"
# The page leaves out these settings, because they change only speed or reports.
_NO_RESULT = ("microbatch_size", "report_every")


def flags_of(program):
    """Returns a dict of the flags that a program defines, without the flags of absl."""
    module = importlib.import_module(f"tfdpx.train.{program}")
    if hasattr(module, "define_flags"):
        values = flags.FlagValues()
        module.define_flags(values)
        return {name: values[name] for name in values}
    if program == "classify":
        return {name: flags.FLAGS[name] for name in (*DEFAULTS, *_OTHERS)}
    return {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(module)}


def flags_page():
    """Returns the generated part of docs/flags.md, a text."""
    parts, rows_of_classify = [], set()
    for program in PROGRAMS:
        summary = inspect.getdoc(importlib.import_module(f"tfdpx.train.{program}")).split("\n")[0]
        rows = dict(_flag_rows(program))
        shared = [name for name, row in rows.items() if row in rows_of_classify]
        if program == "classify":
            rows_of_classify = set(rows.values())
        parts.append(f"\n## {program}\n\n{summary}\n")
        if shared:
            names = ", ".join(f"`--{name}`" for name in shared)
            parts.append(f"\nAs for `classify`: {names}.\n")
        other_rows = [row for name, row in rows.items() if name not in shared]
        parts.extend(["\n| flag | |\n|---|---|\n"] * bool(other_rows) + other_rows)
        if program == "classify":
            parts.extend(["\n| object | arguments |\n|---|---|\n", *_object_rows()])
    return "".join(parts)


def _object_rows():
    """Yields a row for each argument of an object that a flag of `classify` can name."""
    for kind in (HEADS, MODELS, OPTIMIZERS, SCHEDULES, AUGMENTATIONS):
        for name in (text.split()[-1] for text in kind.names):
            arguments = kind.arguments(name) if kind.find(name) else ()
            lines = explanations(kind.constructor(name)) if arguments else {}
            for argument in filter(lines.get, arguments):
                yield f"| `--{kind.flag}={name}:{argument}=` | {_marked(lines[argument])} |\n"


def _flag_rows(program):
    """Yields a pair for each flag of a program: its name, and its row in the table of flags."""
    for name, flag in sorted(flags_of(program).items()):
        default = DEFAULTS.get(name) if program == "classify" else None
        default = default if flag.default is None else flag.default
        has_default = default not in (None, "", dataclasses.MISSING)
        default_text = f" Default: `{str(default).lower()}`." if has_default else ""
        yield name, f"| `--{name}` | {_marked(flag.help)}{default_text} |\n"


def _marked(text):
    """Returns the help of a flag as Markdown for a table cell."""
    text = " ".join(text.split())
    words = re.match("<(.*?)>: ", text)  # The values that a flag takes.
    if words:
        text = f"`{words[1].replace('|', '`, `')}`. {text[words.end() :]}"
    text = re.sub(r"--\w+(=[\w:./+*]*\w\*?)?|\b[A-Z]+(/\(?\w+\)?)*/[\w*.]+", r"`\g<0>`", text)
    return text.replace("|", "\\|").replace("_<", "\\_<").replace("<", "&lt;")


def presets_page():
    """Returns the text of docs/presets.md: a list of settings in the section of each group."""
    page = (DOCS / "presets.md").read_text(encoding="utf-8")
    for group, common in presets.COMMON.items():
        start = page.index("\n- ", page.index(f"\n## {group}\n")) + 1
        end = re.compile("(?:- .*\n)*").match(page, start).end()
        page = page[:start] + "".join(_items(group, common)) + page[end:]
    return page


def _items(group, common):
    """Yields the list items of a group of presets: one for all columns, and one for each column."""
    columns = presets.COLUMNS.get(group, {})
    earlier = list(presets.COMMON)[: list(presets.COMMON).index(group)]
    bases = {f"`{name}`": presets.COMMON[name] for name in earlier}
    yield _item("all" if columns else f"`{group}`", common, bases)
    if any(columns is presets.COLUMNS.get(name) for name in earlier):
        return  # An earlier group has shown these columns.
    above = {}
    for column in columns:
        name = f"{group}/{column}" if column else group
        values = {
            key: value
            for key, value in presets.values_of(name).items()
            if key not in common or common[key] != value
        }
        at = f" at epsilon {presets.EPSILON:g}" * (presets.BY_EPSILON in columns[column])
        yield _item(f"`{name}`{at}", values, above)
        above = {"above": values}


def _item(title, values, bases):
    """Returns a list item that shows the settings of a preset.

    If one of `bases` has at least four equal settings, the item shows only the differences from
    it.
    """
    cells = _cells(values)
    texts = [(text, _cells(base)) for text, base in bases.items() if base.keys() <= values.keys()]
    text, base = max(texts, key=lambda pair: len(cells & pair[1]), default=("", {}.keys()))
    if len(cells & base) >= 4:
        cells = {f"as {text}": None, **{cell: None for cell in cells if cell not in base}}
    return f"- {title}: {', '.join(cells) or 'as all'}\n"


def _cells(values):
    """Returns the settings that an item shows, in order, as Markdown."""
    return {
        f"`{key}={value}`": None
        for key, value in values.items()
        if value is not None and key not in _NO_RESULT
    }.keys()


def pages():
    """Returns a dict from the path of each page to the text that the page should have."""
    head = (DOCS / "flags.md").read_text(encoding="utf-8").partition(MARK)[0]
    return {DOCS / "flags.md": head + MARK + flags_page(), DOCS / "presets.md": presets_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
