"""Counts turns of phrase in docstrings, comments and pages; fails if a count is beyond its bound.

`python tools/plain_english.py` checks all folders of this repository. With names of folders as
arguments, it checks only these folders. The bounds are near the counts in Keras, scikit-learn and
dp_accounting.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

FOLDERS = ("tfdpx", "layers", "models", "train", "experiments", "tools", "tests", "docs")

# From a phrase to its pattern and its largest number of occurrences in 1,000 words. `AT_LEAST` has
# the smallest number instead.
AT_MOST = {
    '"what", "whatever" or "whoever" as a noun at the head of a sentence': (
        r"(?:^|[.:;]\s+)(?:What|Whatever|Whoever)\b(?![^.?!]*\?)",
        0.5,
    ),
    '"of which", "of whom", "whose"': (r"\b(?:of which|of whom|whose)\b", 0.4),
    '"nobody", "somebody", "everybody"': (r"\b(?:nobody|somebody|everybody)\b", 0.0),
    '"as of"': (r"\bas of\b", 0.0),
    '"what"': (r"\bwhat\b", 0.6),
    '"alone", "apart", "anew", "beside"': (r"\b(?:alone|apart|anew|besides?)\b", 0.3),
    '"that of", "those of"': (r"\b(?:that|those) of\b", 0.2),
    '"so that", "so it"': (r"\bso (?:that|it)\b", 0.5),
    '"because", "since"': (r"\b(?:because|since)\b", 1.5),
    '"of its own" and alike': (r"\bof (?:one's|its|their|your|our|his|her|my) own\b", 0.0),
}
AT_LEAST = {
    '"for example", "such as"': (r"\b(?:for example|such as|e\.g\.)", 1.0),
}
# Names that say nothing about the thing that the variable holds.
NAMES = frozenset({"found", "each", "given", "known", "made", "others", "own", "kept", "seen"})
MOST_NAMES = 19


def texts_of(path: pathlib.Path) -> Iterator[str]:
    """Yields each docstring and block of comments of a Python file, or each paragraph of a page."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        without_code = re.sub(r"```.*?```|`[^`]*`", "X", source, flags=re.DOTALL)
        yield from re.split(r"\n\s*\n", without_code)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    block: list[str] = []
    last_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last_line + 1:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last_line = token.start[0]
    yield " ".join(block)


def assignments_of(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each assignment to one of `NAMES`, also in loops."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield node.lineno, node.id


def main(folders: list[str]) -> int:
    """Prints the figures; returns 1 if one is beyond its bound, else 0."""
    root = pathlib.Path(__file__).parent.parent
    paths = sorted(
        path
        for folder in folders or FOLDERS
        for suffix in ("py", "md")
        for path in (root / folder).rglob(f"*.{suffix}")
    )
    texts = [(path, " ".join(text.split())) for path in paths for text in texts_of(path)]
    words = sum(len(text.split()) for _, text in texts)
    failures = 0
    for bounds, is_within in ((AT_MOST, float.__le__), (AT_LEAST, float.__ge__)):
        for phrase, (pattern, bound) in bounds.items():
            places = [
                (path, match, text)
                for path, text in texts
                for match in re.finditer(pattern, text, 0 if "head" in phrase else re.IGNORECASE)
            ]
            figure = 1000 * len(places) / words
            word = "at most" if bounds is AT_MOST else "at least"
            print(f"{figure:6.2f} in 1,000 words, {word} {bound}: {phrase}")
            if not is_within(figure, bound):
                failures += 1
                for path, match, text in places[: 15 if bounds is AT_MOST else 0]:
                    excerpt = text[max(0, match.start() - 20) : match.end() + 40]
                    print(f"         {path.relative_to(root)}: {excerpt}")
    assignments = [
        (path, *place) for path in paths if path.suffix == ".py" for place in assignments_of(path)
    ]
    print(f"{len(assignments):6} assignments to {', '.join(sorted(NAMES))}, at most {MOST_NAMES}")
    if len(assignments) > MOST_NAMES:
        failures += 1
        for path, line, name in assignments[:15]:
            print(f"         {path.relative_to(root)}:{line} {name}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
