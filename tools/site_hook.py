"""Hooks for MkDocs, which builds the site of the documentation. mkdocs.yml names this file.

- Pages outside of `docs/` join the site under their path in the repository.
- A relative link to a file of the repository becomes a link to a page of the site, or plain text
  if the site does not have this file.
- Formulas (in blocks of "math", as on GitHub) become MathML. Browsers show it without a script.
- Each section of `docs/api.md` becomes a page that shows the docstrings of the listed names.
"""

import pathlib
import posixpath
import re
import subprocess

import griffe
import latex2mathml.converter
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUTSIDE = [
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("experiments/**/README.md", "tfdpx/*/README.md"),
]
MATH = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


class AsMeant(griffe.Extension):
    """An extension of griffe that reads docstrings in the style of Keras."""

    def on_class(self, *, cls, **_):
        """Copies the descriptions of the attributes of `PrivateArguments` to the attributes."""
        if cls.name == "PrivateArguments":
            [attributes] = [
                s for s in cls.docstring.parse("google") if s.kind.value == "attributes"
            ]
            for entry in attributes.value:
                described = cls.attributes[entry.name]
                described.docstring = griffe.Docstring(entry.description, parent=described)

    def on_instance(self, *, obj, **_):
        """Changes "Example:" into "Examples:" and indents the code below, as griffe expects."""
        head, mark, code = (obj.docstring.value if obj.docstring else "").partition("Example:\n")
        if mark and code.startswith(">>>"):
            code, gap, rest = code.partition("\n\n")
            indented = "\n".join(f"    {line}" for line in code.splitlines())
            obj.docstring.value = f"{head}Examples:\n{indented}{gap}{rest}"


def rooms():
    """Returns a dict from each module to the Markdown of its section in `docs/api.md`."""
    pages = {}
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        title, *rows = section.splitlines()
        blocks = [f"# {title}"]
        for listed, _, what in (row.partition(":") for row in rows if row.startswith("- ")):
            for name in re.findall(r"`(.*?)`", listed):
                again = what.strip() == "the same class."
                same = f"`{name}` is [tfdpx.{name.split('.')[-1]}][], the same class."
                blocks.append(same if again else f"::: {_home(name)}")
        pages[re.match(r"`(.*?)`", title).group(1)] = "\n\n".join(blocks)
    return pages


def _home(name):
    """Returns the dotted path of a name.

    If a module with the same name defines a function, the path includes the name twice.
    """
    last = name.rpartition(".")[2]
    for folder in ("tfdpx", "layers", "models"):
        for path in (ROOT / folder).rglob(f"{last}.py"):
            if f"\ndef {last}(" in path.read_text(encoding="utf-8"):
                inside = path.relative_to(ROOT).with_suffix("").parts
                return ".".join(["tfdpx", *inside[folder == "tfdpx" :], last])
    return name


def _mathml(formula):
    return latex2mathml.converter.convert(formula.strip(), display="block")


def on_config(config):
    """Sets the version and, if this checkout was cloned by https, the repository's address."""
    source = (ROOT / "tfdpx" / "__init__.py").read_text(encoding="utf-8")
    config.extra["version_of_package"] = re.search(r'__version__ = "(.*)"', source)[1]
    asked = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    origin = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if origin.startswith("https://"):
        config.repo_url = re.sub("//[^/@]*@", "//", origin.removesuffix(".git"))
    return config


def on_files(files, config):
    """Adds pages from outside of `docs/`, and a page for each section of `docs/api.md`."""
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for module, text in rooms().items():
        files.append(File.generated(config, f"api/{module}.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links to files of the repository, and formulas; see the module."""
    docs, here = pathlib.Path(config.docs_dir), page.file.src_uri
    if here == "index.md":
        version = config.extra["version_of_package"]
        markdown = markdown.replace("| version | ", f"| version | {version}, ")
        if config.repo_url:
            markdown = markdown.replace("the folder of this checkout", f"<{config.repo_url}>")
    markdown = MATH.sub(
        lambda block: '<div class="formula">' + _mathml(block[1]) + "</div>", markdown
    )
    if here == "api.md":  # Each name becomes a link to its docstring.
        names = re.compile(r"`(.*?)`")
        markdown = re.sub(
            "^- .*?:",
            lambda row: names.sub(lambda name: f"[{name[0]}][{_home(name[1])}]", row[0]),
            markdown,
            flags=re.MULTILINE,
        )
    folder = posixpath.dirname(here if page.file.generated_by else f"{docs.name}/{here}")

    def turned(link):
        image, text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        uri = path.removeprefix(f"{docs.name}/")
        file = files.get_file_from_path(uri)
        if file:
            if text.endswith(".md"):  # Shows the title of the page, not its file name.
                text = file.content_string.partition("\n")[0].removeprefix("# ")
            there = posixpath.relpath(uri, posixpath.dirname(here) or ".")
            return f"{image}[{text}]({there}{anchor or ''})"
        return text if (ROOT / path).exists() else link.group()

    return LINK.sub(turned, markdown)


def on_page_content(html, page, config, files):
    """Replaces source paths of the build by paths in the repository, with links if it is public."""

    def located(code):
        beside_core = code[1].startswith(("layers/", "models/", "train/"))
        path = code[1] if beside_core else f"tfdpx/{code[1]}"
        text, address = f"<code>{path}</code>", config.repo_url
        return f'<a href="{address}/blob/main/{path}">{text}</a>' if address else text

    return re.sub(r"<code>\.venv-docs/tree/tfdpx/([\w/]+\.py)</code>", located, html)
