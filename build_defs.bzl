"""Macros that give Bazel the import names and tests of this repository."""

def _mapped_py_library_impl(ctx):
    prefix = "imports/" + ctx.attr.package.replace(".", "/")
    links = []
    for src in ctx.files.srcs:
        link = ctx.actions.declare_file(prefix + src.short_path[len(ctx.attr.folder):])
        ctx.actions.symlink(output = link, target_file = src)
        links.append(link)
    deps = [dep[PyInfo] for dep in ctx.attr.deps]
    sources = depset(links, transitive = [dep.transitive_sources for dep in deps])
    return [
        DefaultInfo(files = depset(links), runfiles = ctx.runfiles(transitive_files = sources)),
        PyInfo(
            transitive_sources = sources,
            imports = depset(
                [ctx.workspace_name + "/imports"],
                transitive = [dep.imports for dep in deps],
            ),
        ),
    ]

_mapped_py_library = rule(
    doc = "A Python library whose files are imported below `package`, not below their folder.",
    implementation = _mapped_py_library_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = True, doc = "Files of the folder."),
        "deps": attr.label_list(providers = [PyInfo]),
        "folder": attr.string(mandatory = True, doc = "Folder that holds the files."),
        "package": attr.string(mandatory = True, doc = "Import name of the folder."),
    },
)

def mapped_py_library(name, folder, package, deps = []):
    """Declares a library of everything in a folder, under the import name that setup.py gives it.

    Args:
      name: Name of the target.
      folder: Folder below the root of the repository.
      package: Import name of the folder, e.g. `tfdpx.layers`.
      deps: Libraries that this one imports.
    """
    _mapped_py_library(
        name = name,
        srcs = native.glob([folder + "/**"], exclude = ["**/__pycache__/**", "**/*.pyc"]),
        folder = folder,
        package = package,
        deps = deps,
        visibility = ["//visibility:public"],
    )

def pytest_tests(name, folder, deps = [], data = []):
    """Declares a test for each `*_test.py` of a folder, named after its path without `.py`.

    Args:
      name: Name of the suite of all of them.
      folder: Folder below the root of the repository.
      deps: Libraries that the tests import.
      data: Files that the tests read, beside those of the folder.
    """
    tests = native.glob([folder + "/**/*_test.py"])
    native.py_library(
        name = name + "_support",
        testonly = True,
        srcs = native.glob([folder + "/**/*.py"], exclude = tests),
        data = native.glob(
            [folder + "/**"],
            exclude = ["**/__pycache__/**", "**/*.py", "**/*.pyc"],
        ),
    )
    for test in tests:
        native.py_test(
            name = test[:-len(".py")],
            srcs = [test, "tools/run_pytest.py"],
            main = "tools/run_pytest.py",
            args = ["$(location %s)" % test],
            data = data + [test],
            deps = deps + [name + "_support"],
            legacy_create_init = False,
        )
    native.test_suite(name = name, tests = [test[:-len(".py")] for test in tests])
