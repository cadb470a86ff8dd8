"""Installs the four folders of this repository as one package, `tfdpx`."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent

# Import name -> folder. A folder's sub-packages are found below it; nothing else needs listing.
PACKAGE_DIR = {
    "tfdpx": "tfdpx",
    "tfdpx.layers": "layers",
    "tfdpx.models": "models",
    "tfdpx.train": "train",
}


def find_packages():
    """Returns the import names of every package of the four folders."""
    names = []
    for name, folder in PACKAGE_DIR.items():
        names.append(name)
        names.extend(f"{name}.{sub}" for sub in setuptools.find_packages(str(ROOT / folder)))
    return names


def read_version():
    """Reads `__version__` as text, since importing tfdpx would need TensorFlow."""
    source = (ROOT / "tfdpx" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE).group(1)


def read_readme():
    """Returns the text for the package index; a checkout without README still installs."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setuptools.setup(
    name="tfdpx",
    version=read_version(),
    description="Differentially private training for Keras 3 on TensorFlow",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    author="The tfdpx developers",
    license="Apache-2.0",
    python_requires=">=3.10",
    keywords="differential privacy, DP-SGD, Keras, TensorFlow, machine learning",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Security",
        "Typing :: Typed",
    ],
    entry_points={"console_scripts": ["tfdpx = tfdpx.train.command:main"]},
    package_dir=PACKAGE_DIR,
    packages=find_packages(),
    package_data={"tfdpx": ["py.typed"], "tfdpx.report": ["templates/*"]},
    install_requires=[
        # Keras's train_step, which tfdpx/_keras/hook.py wraps, is tested on these ranges.
        "tensorflow>=2.16.2,<2.23",
        # On 3.8 a metric differed between one device and two replicas; 3.10 passes, 3.9 is untried.
        "keras>=3.10,<3.17",
        # Its metadata refuses Python 3.12 and later, and pins dp-accounting and NumPy 1; tfdpx
        # works without it, there with the newest of both.
        "tensorflow-privacy==0.9.0; python_version < '3.12'",
        # From 0.4.4 on RDP leaves out fractional orders that do not converge: valid, but up to 3%
        # higher at a large q.
        "dp-accounting==0.4.3; python_version < '3.12'",
        "dp-accounting>=0.5; python_version >= '3.12'",
        "numpy>=1.26; python_version < '3.12'",
        "numpy>=2; python_version >= '3.12'",
        # Others need another NumPy and do not say so: 26 needs 2, 23 runs on 1.26.
        "pyarrow>=14,<24; python_version < '3.12'",
        "pyarrow>=16; python_version >= '3.12'",
        "keras-cv==0.9.0",
        "tensorflow-datasets>=4.9.4",
        # tensorflow-datasets needs it to write data sets and does not declare it.
        "importlib_resources",
        "absl-py>=1.0",
        "tensorboard>=2.16",
        "scipy>=1.11",
        # The first with `validate_data` and tags as tfdpx/tables/estimators.py has them.
        "scikit-learn>=1.6",
        "matplotlib>=3.8",
        "pillow>=10",
        "jinja2>=3.1",
        "rich>=13",
    ],
    extras_require={
        "pandas": ["pandas>=2"],  # docs/data_scientists.md.
        # docs/text.md. Not among the tests: 250 MB, most of it tensorflow-text.
        # For Python 3.10 pip found no set of versions in ten minutes.
        "text": ["keras-hub>=0.32; python_version >= '3.11'"],
        "test": [
            "optuna>=4",
            "pytest>=8.2",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "pre-commit>=3.7",
            "ruff>=0.9",
            # Another version finds other errors.
            "mypy==2.4.1",
            # The oracle of Scattering2D, of which the package itself needs nothing.
            "kymatio==0.3.0",
        ],
    },
)
